"""Who a request comes from, and an endpoint that does only what that principal may do (R48).

A token comes as `Authorization: Bearer pst_…` or `X-Postroom-Token`; a client certificate counts by its
name. `Permitted` asks the table of operations what each one needs before the broker is asked, so that no
handler can forget to. A broker started with `--dev` lets anybody in who is on this machine; a web page that
a browser on this machine shows is not one of them, and neither does a client's certificate speak for pages of
other sites (`refuse_pages`). A log-in of the console is a cookie (`Logins`); a token counts before it.

Must never log a token, and never put one into an error.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping, Sequence
from typing import Any, Protocol
from urllib.parse import urlsplit

from ..broker.access import Gatekeeper
from ..broker.served import Servable
from ..endpoint.asking import AskingEndpoint
from ..endpoint.operations import OPERATIONS, Operation
from ..endpoint.requests import Beats
from ..endpoint.values import Beat, Held
from ..errors import NotAuthenticated, PermissionDenied, UnknownTopic
from ..model.access import ANONYMOUS, Principal
from ..model.delivery.delivery import Span
from ..serve_settings import is_loopback

__all__ = [
    "CERTIFICATE_NAME", "HEADERS", "LOGGED_IN", "Logins", "Permitted", "authenticate", "careful",
    "refuse_pages", "token_of",
]  # fmt: skip


# ---- browsers ----
# A browser adds a client's certificate, or the address of this machine, to requests of any page it shows. So
# where one of these is all that says who somebody is, the page must be this broker's own: its scheme, its
# name and its port. A token is not added by itself: whoever has one meant it.

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
    """Returns a `send` that adds `HEADERS` to every answer."""

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


# ---- principals ----

CERTIFICATE_NAME = "postroom.certificate_name"
"""Where the server puts the name of a client's certificate in the scope of a request."""


LOGGED_IN = "postroom.logged_in"
"""Where it is put in the state of a request that a log-in's cookie says who asks."""


class Logins(Protocol):
    """Those who have logged in with a browser, which says so by a cookie."""

    async def principal(self, scope: Mapping[str, Any], headers: Mapping[bytes, bytes]) -> Principal | None:
        """Returns who this is; None: it has not logged in. PermissionDenied if another page may ask."""


async def authenticate(
    scope: Mapping[str, Any], gatekeeper: Gatekeeper, logins: Logins | None = None
) -> Principal:
    headers = {name.lower(): value for name, value in scope["headers"]}
    client, token, name = scope.get("client"), token_of(headers), scope.get(CERTIFICATE_NAME)
    if logins is not None and not token and (known := await logins.principal(scope, headers)) is not None:
        scope["state"][LOGGED_IN] = True
        return known
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
    """Returns the token; None if there is none. What is no token at all is refused: nobody could have it."""
    own = headers.get(b"x-postroom-token")
    if own is not None:
        return own.decode("latin-1").strip() or None
    scheme, _, rest = headers.get(b"authorization", b"").decode("latin-1").strip().partition(" ")
    if not scheme:
        return None
    if scheme.lower() != "bearer" or not rest.strip():
        raise NotAuthenticated("the header is written `Authorization: Bearer pst_…`")
    return rest.strip()


class Permitted(AskingEndpoint):
    """The broker, for one principal. Closing it leaves the broker alone."""

    def __init__(self, broker: Servable, gatekeeper: Gatekeeper, principal: Principal) -> None:
        self._broker, self._gatekeeper = broker, gatekeeper
        self.principal = principal  # with the permissions it has now

    def permit(self, name: str, *topics: str | None) -> None:
        """PermissionDenied unless the principal may do what this operation does to these topics."""
        for topic in topics:
            self._gatekeeper.check(self.principal, OPERATIONS[name].need, topic)

    async def check_places(self, name: str, places: Collection[tuple[str, int]]) -> None:
        """PermissionDenied, or UnknownPartition: what is settled is of a topic that the principal may use."""
        self.permit(name, *{topic for topic, _ in places})
        await self._gatekeeper.check_places(places)

    async def _ask(self, operation: Operation, arguments: dict[str, Any]) -> Any:
        asked = arguments.copy()
        asked.pop(operation.body, None)
        self._gatekeeper.permit(self.principal, operation, operation.request(**asked))
        arguments.update(operation.told(self.principal))
        try:
            return await getattr(self._broker, operation.name)(**arguments)
        except UnknownTopic as error:
            raise self._gatekeeper.shown(self.principal, error) from None

    def beat(self, beats: Sequence[Beat]) -> list[tuple[Held, tuple[Span, ...]]]:
        """Blocks."""
        self._gatekeeper.permit(self.principal, OPERATIONS["beat"], Beats(tuple(beats)))
        return self._broker.beat(beats)

    def now_ms(self) -> int:
        return self._broker.now_ms()

    def reached_ms(self) -> int:
        return self._broker.reached_ms()

    async def close(self) -> None:
        """The broker lives on."""
