"""Who is let in to a served broker, and what each may ask for (R48).

Decides who somebody is (by token, or by the name in a client's certificate). What a call needs is in its row
of `endpoint.operations`, and rules about topics are in `model.access`.

What a server has to do, for every request of a connection:

    principal = await gatekeeper.authenticate(token, peer_is_loopback=…, certificate_name=…)   # once
    principal = await gatekeeper.current(principal)                  # NotAuthenticated if it was removed
    gatekeeper.permit(principal, operation, request)                 # PermissionDenied
    await gatekeeper.check_partition(topic, partition_id)            # where a request names both

Answers are remembered for `access_fresh_ms`: so long a token that was removed may still be used. Only who was
found is remembered. A token must never be kept, logged or shown; what is kept is its hash.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from ..clock import Clock
from ..config import DEFAULTS, Limits
from ..endpoint.operations import Operation
from ..endpoint.requests import Request
from ..errors import (
    NotAuthenticated,
    PermissionDenied,
    StoreError,
    StoreUnavailable,
    UnknownPartition,
    UnknownTopic,
    shortened,
)
from ..model.access import ANONYMOUS, Need, Principal, allows, hash_of, is_name, is_token, needed, visible
from ..model.policy.bounds import make_room
from ..model.topology.names import unknown_topic
from ..store.contract import Store
from ..tasks import SingleFlight

__all__ = ["KINDS", "SHOWN", "Gatekeeper", "InThread", "Refusals", "new_token"]


# ---- refusals ----

SHOWN = 10  # lines of each kind in a minute
_MINUTE_S = 60.0

KINDS = {
    "greeting": "refused greetings",
    "wrong token": "warnings of wrong tokens",
    "http": "refused requests over HTTP",
}
"""What is counted, as the line about the rest calls it."""


class Refusals:
    """Logs that strangers were refused: a few lines of each kind in a minute, and then a count.

    Whoever can reach a port can be refused a thousand times a second. The first `SHOWN` lines of a minute are
    written as they are; of all others there is one line when the minute is over. Nothing else may log a
    refusal. Used in the event loop only.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began: dict[str, float] = {}
        self._count: dict[str, int] = {}
        self._log: dict[str, logging.Logger] = {}

    def say(self, kind: str, log: logging.Logger, message: str, *args: Any) -> None:
        """Log a warning, or only count it."""
        self.tick()
        self._began.setdefault(kind, self._clock())
        self._log[kind] = log
        self._count[kind] = count = self._count.get(kind, 0) + 1
        if count <= SHOWN:
            log.warning(message, *args)

    def tick(self) -> None:
        """Tell of what was left out in minutes that are over; from time to time."""
        now = self._clock()
        for kind in [kind for kind, began in self._began.items() if now - began >= _MINUTE_S]:
            del self._began[kind]
            more = self._count.pop(kind) - SHOWN
            if more > 0:
                self._log[kind].warning("… and %s more %s in the last minute", f"{more:,}", KINDS[kind])


# ---- gatekeeper ----

T = TypeVar("T")

log = logging.getLogger("postroom.access")

_MOST = 10_000  # principals, and partitions, that are remembered
_WRONG_PER_S = 10  # wrong tokens a second that are answered at once
_NAMED = 120  # characters of a topic that a refusal repeats: all that a topic's name may have
_ASKING = 2  # look-ups at once: a flood of tokens must not keep the broker's threads from their work


class InThread(Protocol):
    """Runs a blocking call in a thread: `Workers.run`."""

    def __call__(self, function: Callable[..., T], /, *args: Any) -> Awaitable[T]: ...


@dataclass(frozen=True, slots=True)
class _CachedPrincipal:
    principal: Principal
    read_at: int


class Gatekeeper:
    """`dev`: whoever comes from this machine without a token may do everything."""

    def __init__(
        self,
        store: Store,
        in_thread: InThread,
        clock: Clock,
        *,
        dev: bool = False,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        limits: Limits = DEFAULTS,
    ) -> None:
        self._store = store
        self._fresh_ms, self._slow_s = limits.access_fresh_ms, limits.tuning.broker.wrong_token_s
        self._in_thread = in_thread
        self._clock = clock
        self._dev = dev
        self._sleep = sleep
        self._known: dict[tuple[str, str], _CachedPrincipal] = {}  # by ("secret", hash) or ("name", name)
        self._asked: dict[tuple[str, str], asyncio.Task[Principal | None]] = {}
        self._turns = asyncio.Semaphore(_ASKING)
        self._wrong: deque[int] = deque(maxlen=_WRONG_PER_S)
        self._looks = SingleFlight(in_thread)
        self._topics: dict[int, str] = {}  # of partitions; their ids are never used again
        self.refusals = Refusals()  # what is logged about them, by whoever uses this gatekeeper

    # ---- who ----

    async def authenticate(
        self, token: str | None, *, peer_is_loopback: bool, certificate_name: str | None = None
    ) -> Principal:
        """Who this is. A token counts before a certificate. NotAuthenticated says what to do."""
        if token:
            found = await self._find(("secret", hash_of(token))) if is_token(token) else None
            if found is not None:
                return found
            await self._slow_down()
            raise NotAuthenticated(
                "invalid token: it is mistyped, or was rotated or revoked; "
                "`postroom access rotate NAME` makes a new one"
            )
        if certificate_name:
            found = await self._find(("name", certificate_name)) if is_name(certificate_name) else None
            if found is not None:
                return found
            await self._slow_down()
            raise NotAuthenticated(
                f"the certificate names {shortened(certificate_name)}, and there is no such principal: "
                f"`postroom access add {certificate_name[:_NAMED]} --no-token` makes it"
            )
        if self._dev and peer_is_loopback:
            return ANONYMOUS
        raise NotAuthenticated(
            "this broker asks for a token: connect(url, token='pst_…'), or set POSTROOM_TOKEN; "
            "`postroom access add NAME --allow …` makes one"
        )

    async def current(self, principal: Principal) -> Principal:
        """Returns the principal with the permissions it has now; NotAuthenticated if its token is gone."""
        known = self.known(principal)
        if known is not None:
            return known
        found = await self._find(_key_of(principal))
        if found is None:
            raise NotAuthenticated(
                f"principal {principal.name!r} was removed, or its token rotated: connect with the new one"
            )
        return found

    def known(self, principal: Principal) -> Principal | None:
        """Returns what `current` would; None: the store has to be asked."""
        if principal is ANONYMOUS:
            return principal
        known = self._known.get(_key_of(principal))
        return known.principal if known is not None and self._fresh(known) else None

    def _fresh(self, known: _CachedPrincipal) -> bool:
        return 0 <= self._clock.now_ms() - known.read_at < self._fresh_ms

    async def _find(self, key: tuple[str, str]) -> Principal | None:
        known = self._known.get(key)
        if known is not None and self._fresh(known):
            return known.principal
        asked = self._asked.get(key)
        if asked is None:  # one question for all who wait for this answer
            asked = self._asked[key] = asyncio.create_task(self._ask(key))
            asked.add_done_callback(lambda done: self._answered(key, done))
        try:
            return await asyncio.shield(asked)
        except StoreError:
            if known is None:
                raise
            return known.principal  # nobody can be removed while the store is away

    def _answered(self, key: tuple[str, str], done: asyncio.Task[Principal | None]) -> None:
        del self._asked[key]
        if not done.cancelled():
            done.exception()  # whoever waited for it may be gone: then nobody else looks at it

    async def _ask(self, key: tuple[str, str]) -> Principal | None:
        kind, value = key
        now = self._clock.now_ms()  # before the answer, so that it is never thought newer than it is
        async with self._turns:
            access = self._store.access
            found = await self._in_thread(access.by_secret if kind == "secret" else access.by_name, value)
        if found is None:
            self._known.pop(key, None)
            return None
        if kind == "name":
            found = replace(found, secret_hash="")  # that is not what it came with
        make_room(self._known, _MOST)
        self._known[key] = _CachedPrincipal(found, now)
        return found

    async def _slow_down(self) -> None:
        """More wrong tokens than a slip of the hand: whoever guesses waits for each answer."""
        now = self._clock.now_ms()
        many = len(self._wrong) == _WRONG_PER_S and 0 <= now - self._wrong[0] < 1000
        self._wrong.append(now)
        if many:
            said = "more than %d wrong tokens in a second: they are answered slowly"
            self.refusals.say("wrong token", log, said, _WRONG_PER_S)
            await self._sleep(self._slow_s)

    # ---- what ----

    def permit(self, principal: Principal, operation: Operation, request: Request) -> None:
        """Raises PermissionDenied unless the principal may ask this of every topic it is about."""
        for topic in operation.topics(request, principal.name):
            self.check(principal, operation.need, topic)

    def check(self, principal: Principal, need: Need, topic: str | None) -> None:
        """Raises PermissionDenied, with the grant that is missing. `topic` None: the whole queue."""
        if allows(principal, need, topic):
            return
        wanted, base = (need, "*") if topic is None else needed(need, topic)
        about = "the queue as a whole" if topic is None else f"topic {shortened(base, _NAMED)}"
        base = base if len(base) <= _NAMED else f"{base[:_NAMED]}…"
        what, grant, other = f"may not {wanted} {about}", f"{wanted}:{base}", ""
        if wanted == "any":
            what, grant, other = f"has no permission on {about}", f"send:{base}", f", or consume:{base},"
        name = principal.name
        raise PermissionDenied(
            f"principal {name!r} {what}: `postroom access grant {name} {grant}`{other} allows it",
            principal=name,
            permission=grant,
        )

    def visible(self, principal: Principal, topics: Iterable[str]) -> set[str]:
        """Returns those of these topics that the principal is shown."""
        return set(visible(principal, topics))

    async def check_places(self, places: Iterable[tuple[str, int]]) -> None:
        """Checks deliveries as `check_partition` does: nobody makes progress where there is no partition.

        While the store is away nothing is refused: it cannot be told, and progress cannot begin then either.
        """
        for topic, partition_id in places:
            if self._topics.get(partition_id) != topic:
                try:
                    await self.check_partition(topic, partition_id)
                except StoreUnavailable:
                    return

    def shown(self, principal: Principal, error: UnknownTopic) -> UnknownTopic:
        """Returns the error without the names of topics that the principal is not shown."""
        close = error.details.get("close") or ()
        allowed = visible(principal, close)
        return error if len(allowed) == len(close) else unknown_topic(str(error.details["topic"]), allowed)

    async def check_partition(self, topic: str, partition_id: int) -> None:
        """Raises UnknownPartition if it is not a partition of that topic: permissions are about topics."""
        if self.knows_partition(topic, partition_id):
            return
        known = {partition_id} if self._topics.get(partition_id) == topic else None
        if partition_id not in await self._looks.look(topic, known, self._partitions, topic):
            raise UnknownPartition(
                f"that is not a partition of topic {shortened(topic)}: fetch the route again", topic=topic
            )
        make_room(self._topics, _MOST)
        self._topics[partition_id] = topic

    def knows_partition(self, topic: str, partition_id: int) -> bool:
        """Returns whether it is one of that topic, and nobody who asked waits for the answer."""
        return self._topics.get(partition_id) == topic and not self._looks.busy(topic)

    def _partitions(self, topic: str) -> set[int]:
        """All that it ever had; whether one is still there is for others to say."""
        route = self._store.catalog.topic(topic).route
        older = [piece for version in self._store.routes.history(topic) for piece in version.ranges]
        return {piece.partition_id for piece in (*route.partitions, *older)}


def _key_of(principal: Principal) -> tuple[str, str]:
    return ("secret", principal.secret_hash) if principal.secret_hash else ("name", principal.name)


def new_token() -> str:
    """256 random bits. Shown once; what is stored is `hash_of`."""
    return f"pst_{secrets.token_urlsafe(32)}"
