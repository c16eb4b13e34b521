"""Who a request comes from, and an endpoint that does only what that principal may do (R48).

A token comes as `Authorization: Bearer pst_…` or `X-Postroom-Token`; a client certificate counts by its
name. `Permitted` asks `broker.gatekeeper.ACTIONS` about every verb before the broker is asked, so that no
handler can forget to. A broker started with `--dev` lets anybody in who is on this machine; a web page that
a browser on this machine shows is not one of them, and neither does a client's certificate speak for pages of
other sites (`browsers`).

Must never log a token, and never put one into an error.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, MutableMapping
from functools import partial
from typing import Any, cast
from urllib.parse import urlsplit

from ..broker.access import ACTIONS, Gatekeeper
from ..broker.broker import Broker
from ..endpoint.endpoint import Endpoint
from ..errors import NotAuthenticated, PermissionDenied, UnknownTopic
from ..model.access import ANONYMOUS, Principal
from ..model.topology.names import reply_topic
from ..serve_settings import is_loopback

__all__ = ["CERTIFICATE_NAME", "HEADERS", "Permitted", "authenticate", "careful", "refuse_pages", "token_of"]


# ---- browsers ----
# Browsers: what every answer tells them, and whose pages may use a broker without a token of their own.
#
# A browser adds a client's certificate, or the address of this machine, to requests of any page it shows.
# So where one of these is all that says who somebody is, the page must be this broker's own: its scheme,
# its name and its port (`refuse_pages`). A token is not added by itself: whoever has one meant it.

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_POLICY = b"content-security-policy"
HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (_POLICY, b"default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"),
)
"""On every answer; one that has a policy of its own keeps it."""

_OWN = (
    "same-origin",
    "none",
)  # what browsers say of pages of the same site, and of addresses that were typed
_PORTS = {"http": 80, "https": 443}


def careful(send: Send) -> Send:
    """Sends with `HEADERS`."""

    async def sending(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            own = list(message.get("headers", ()))
            there = {name for name, _ in own}
            message["headers"] = [*own, *(one for one in HEADERS if one[0] not in there)]
        await send(message)

    return sending


def refuse_pages(scope: Mapping[str, Any], headers: Mapping[bytes, bytes], *, dev: bool) -> None:
    """PermissionDenied for a page of another site; with `dev` also for names that are not this machine's."""
    host = headers.get(b"host", b"").decode("latin-1")
    origin, site = headers.get(b"origin"), headers.get(b"sec-fetch-site")
    own = _place(f"{scope.get('scheme', 'http')}://{host}")
    foreign = origin is not None and (own is None or _place(origin.decode("latin-1")) != own)
    foreign = foreign or (site is not None and site.decode("latin-1").lower() not in _OWN)
    if dev and (foreign or own is None or not is_loopback(own[1])):
        raise PermissionDenied(
            "this broker was started with --dev and takes requests without a token from this machine only: "
            "call it by 127.0.0.1 or localhost, and not from another site's page"
        )
    if foreign:
        raise PermissionDenied(
            "a page of another site cannot use a client's certificate: call this broker from its own origin, "
            "from a program, or with a token"
        )


def _place(address: str) -> tuple[str, str, int | None] | None:
    """Scheme, name and port of an origin; None: it is none."""
    try:
        found = urlsplit(address)
        if not found.hostname:
            return None
        return found.scheme, found.hostname, found.port or _PORTS.get(found.scheme)
    except ValueError:
        return None


# ---- access ----

CERTIFICATE_NAME = "postroom.certificate_name"
"""Where the server puts the name of a client's certificate in the scope of a request."""

_WHOLE = ("topics", "shards", "drain_shard", "open_shard", "rates")  # about no topic in particular
_STAGED = ("staged_marks", "decide_staged", "publish_staged", "drop_staged")  # about several topics
_REPLIES = ("open_replies", "close_replies")
_TOLD = {
    "append": ("producer", "owner"),
    "stage": ("producer", "owner"),
    **dict.fromkeys(_STAGED, ("owner",)),
}


async def authenticate(scope: Mapping[str, Any], gatekeeper: Gatekeeper) -> Principal:
    headers = {name.lower(): value for name, value in scope["headers"]}
    client, token, name = scope.get("client"), token_of(headers), scope.get(CERTIFICATE_NAME)
    loopback = client is not None and is_loopback(client[0])
    try:
        found = await gatekeeper.authenticate(token, peer_is_loopback=loopback, certificate_name=name)
    except NotAuthenticated:
        if token or name:
            raise
        raise NotAuthenticated(
            "this broker asks for a token: send `Authorization: Bearer pst_…`; `postroom access add NAME "
            "--allow …` makes one"
        ) from None
    if not token:  # a browser says the rest by itself
        refuse_pages(scope, headers, dev=found is ANONYMOUS)
    return found


def token_of(headers: Mapping[bytes, bytes]) -> str | None:
    """None: there is none. What is no token at all is refused here, since nobody could have it."""
    own = headers.get(b"x-postroom-token")
    if own is not None:
        return own.decode("latin-1").strip() or None
    scheme, _, rest = headers.get(b"authorization", b"").decode("latin-1").strip().partition(" ")
    if not scheme:
        return None
    if scheme.lower() != "bearer" or not rest.strip():
        raise NotAuthenticated("the header is written `Authorization: Bearer pst_…`")
    return rest.strip()


class Permitted:
    """The broker, for one principal. Closing it leaves the broker alone."""

    def __init__(self, broker: Broker, gatekeeper: Gatekeeper, principal: Principal) -> None:
        self._broker, self._gatekeeper = broker, gatekeeper
        self.principal = principal  # with the permissions it has now

    @property
    def endpoint(self) -> Endpoint:
        return cast(Endpoint, self)

    def permit(self, verb: str, *topics: str | None) -> None:
        for topic in topics:
            self._gatekeeper.check(self.principal, ACTIONS[verb], topic)

    async def check_places(self, verb: str, places: Collection[tuple[str, int]]) -> None:
        """PermissionDenied, or UnknownPartition: what is settled is of a topic that the principal may use."""
        self.permit(verb, *{topic for topic, _ in places})
        await self._gatekeeper.check_places(places)

    def __getattr__(self, verb: str) -> Any:
        if verb not in ACTIONS:
            raise AttributeError(verb)
        return partial(self._call, verb, getattr(self._broker, verb))

    async def _call(
        self, verb: str, function: Callable[..., Awaitable[Any]], *args: Any, **named: Any
    ) -> Any:
        self.permit(verb, *_topics(verb, args, named, self.principal.name))
        if self.principal is not ANONYMOUS:  # no caller says itself whose producer or query it is (I23)
            named |= dict.fromkeys(_TOLD.get(verb, ()), self.principal.name)
        if verb in _REPLIES:
            named["owner"] = self.principal.name
        try:
            return await function(*args, **named)
        except UnknownTopic as error:
            raise self._gatekeeper.shown(self.principal, error) from None

    async def topics(self) -> Any:
        return await self._broker.topics(viewer=self.principal)

    def beat(self, beats: Any) -> Any:
        """Blocks."""
        for beat in beats:
            self.permit("beat", beat.topic, *(held.topic for held in beat.held))
        return self._broker.beat(beats)

    def now_ms(self) -> int:
        return self._broker.now_ms()

    async def close(self) -> None: ...


def _topics(verb: str, args: tuple[Any, ...], named: Mapping[str, Any], who: str) -> Iterable[str | None]:
    """The topics that a call is about; None: the whole queue."""
    if verb in _WHOLE:
        return (None,)
    first = args[0] if args else next(iter(named.values()))
    if verb in _REPLIES:
        return (reply_topic(first, who),)
    if verb in _STAGED:
        return first or (None,)
    if verb in ("poll", "unpark"):
        return (first.topic,)
    if verb == "set_rate":
        return (first.subject[0] or None,)
    if verb == "settle":
        parts = args[2] if len(args) > 2 else named["parts"]
        return (first, *{part.topic for part in parts})
    return (first,)
