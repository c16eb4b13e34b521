"""Who a request comes from, and an endpoint that does only what that principal may do (R48).

A token comes as `Authorization: Bearer pst_…` or `X-Postroom-Token`; a client certificate counts by its
name. `Permitted` asks `broker.gatekeeper.ACTIONS` about every verb before the broker is asked, so that no
handler can forget to. A broker started with `--dev` lets anybody in who is on this machine; a web page that
a browser on this machine shows is not one of them, and neither does a client's certificate speak for pages of
other sites (`browsers`).

Must never log a token, and never put one into an error.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, cast

from ..broker.embedded import Broker
from ..broker.endpoint import Endpoint
from ..broker.gatekeeper import ACTIONS, Gatekeeper
from ..errors import NotAuthenticated, UnknownTopic
from ..model.access import ANONYMOUS, Principal
from ..serve_settings import is_loopback
from .browsers import refuse_pages

__all__ = ["CERTIFICATE_NAME", "Permitted", "authenticate", "token_of"]

CERTIFICATE_NAME = "postroom.certificate_name"
"""Where the server puts the name of a client's certificate in the scope of a request."""

_WHOLE = ("topics", "shards", "drain_shard", "open_shard", "rates")  # about no topic in particular


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
        self.permit(verb, *_topics(verb, args, named))
        if verb == "append" and self.principal is not ANONYMOUS:
            named["producer"] = self.principal.name
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


def _topics(verb: str, args: tuple[Any, ...], named: Mapping[str, Any]) -> Iterable[str | None]:
    """The topics that a call is about; None: the whole queue."""
    if verb in _WHOLE:
        return (None,)
    first = args[0] if args else next(iter(named.values()))
    if verb in ("poll", "unpark"):
        return (first.topic,)
    if verb == "set_rate":
        return (first.subject[0] or None,)
    if verb == "settle":
        parts = args[2] if len(args) > 2 else named["parts"]
        return (first, *{part.topic for part in parts})
    return (first,)
