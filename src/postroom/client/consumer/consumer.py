"""The consumer: hands messages of one group to the user, and settles what the user decides.

Decides the life of a membership: subscribe, keep the window filled, and on leaving settle or release
everything it holds. A release counts for nothing, so whoever leaves harms nobody; failures that should count
are told with `retry`. Must never hand out a message twice, or one whose lease has passed, and never ack a
message in mode "after" whose handling raised.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Protocol, Self, TypeVar

from ...broker.served import embedded
from ...config import DEFAULTS, Limits
from ...endpoint.endpoint import Endpoint
from ...endpoint.values import GroupInfo, Verdict
from ...errors import ClosedError, InvalidSetting, PostroomError, UnknownGroup, UsageError
from ...model.policy.settings import GroupWish
from ...model.topology.names import base_of
from ...tasks import end
from ...units import Duration, duration_ms
from ..message import Received
from ..owner_check import Guard
from .fetch import Fetcher
from .heartbeat import Heart, Heartbeat
from .in_flight import Deliveries, Membership, Window, delivery_of
from .ordered.fetch import OrderedFetcher
from .ordered.partitions import AssignedPartitions
from .settle import Run, Settler, runs_of

__all__ = ["AckMode", "Consumer", "ConsumerSettings", "runs_of"]

log = logging.getLogger("postroom.consumer")

AckMode = Literal["manual", "after", "on_delivery"]
T = TypeVar("T")

_ITERATION_ON_DELIVERY = 100  # `async for` asks for so many that are settled on delivery


@dataclass(frozen=True, slots=True)
class ConsumerSettings:
    topic: str
    group: str
    member: str
    client: str
    wish: GroupWish
    ack: AckMode = "manual"
    window: Window = field(default_factory=Window)
    max_handling_ms: int = DEFAULTS.max_handling_ms
    named: bool = True  # the user gave the member its name
    limits: Limits = DEFAULTS

    def __post_init__(self) -> None:
        if self.ack not in ("manual", "after", "on_delivery"):
            raise InvalidSetting(f"ack={self.ack!r}: choose 'manual', 'after' or 'on_delivery'")
        for name, value in (("window", self.window.messages), ("window_bytes", self.window.bytes)):
            if type(value) is not int or value < 1:
                raise InvalidSetting(f"{name}={value!r}: a whole number from 1 up")


class Explain(Protocol):
    """Makes errors about a topic more helpful."""

    async def __call__(self, topic: str, call: Awaitable[T]) -> T: ...


class Consumer:
    """Made by `Connection.consumer`; use it as `async with`."""

    def __init__(
        self,
        endpoint: Endpoint,
        guard: Guard,
        heartbeat: Heartbeat,
        settings: ConsumerSettings,
        explain: Explain,
    ) -> None:
        self._endpoint, self._guard, self._heartbeat = endpoint, guard, heartbeat
        self._settings, self._explain = settings, explain
        self._who = Membership(
            settings.topic, settings.group, settings.member, settings.client, settings.max_handling_ms,
            limits=settings.limits,
        )  # fmt: skip
        self._equip()
        self._joined: GroupInfo | None = None
        self._fetching: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._previous: list[Received] = []  # mode "after": acked when more is asked for
        self._acking: asyncio.Future[None] | None = None  # such acks on their way
        self._failure: BaseException | None = None  # of such an ack

    def _equip(self, order: str | None = None) -> None:
        """Make the parts. `order`: what is in order in an ordered group, where partitions are held."""
        endpoint, who, settings = self._endpoint, self._who, self._settings
        on_delivery = settings.ack == "on_delivery"
        if order is None:
            self._in_flight = in_flight = Deliveries()
            self._settler = Settler(endpoint, self._guard, in_flight, who)
            self._fetcher = Fetcher(
                endpoint, who, in_flight, self._settler, settings.window, on_delivery=on_delivery
            )
            self._heart = Heart(who, in_flight)
            return
        token = secrets.randbits(62) + 1
        partitions = AssignedPartitions(who, token, whole=order == "partition", on_delivery=on_delivery)
        self._in_flight = partitions
        self._settler = Settler(endpoint, self._guard, partitions, who)
        self._fetcher = fetcher = OrderedFetcher(
            endpoint, who, partitions, self._settler, settings.window,
            on_delivery=on_delivery, handling_ms=self._heartbeat.handling_ms,
        )  # fmt: skip
        self._heart = Heart(who, partitions, fetcher.nudge)

    @property
    def topic(self) -> str:
        return self._settings.topic

    @property
    def group(self) -> str:
        return self._settings.group

    @property
    def member(self) -> str:
        return self._settings.member

    @property
    def begins_anew(self) -> bool:
        """Its group (in mode "broadcast" its own) was made when it entered, so that it goes on from nowhere.

        For a member with a name also until it has settled something.
        """
        return self._joined is not None and self._joined.fresh

    @property
    def in_hand(self) -> int:
        """Messages held by this consumer: waiting here, or handed out and not settled."""
        return self._in_flight.messages

    @property
    def expired(self) -> int:
        """Messages that were dropped, and settled, because their `expires` had passed."""
        return self._fetcher.expired + self._settler.answers.expired

    # ---- messages ----

    async def poll(self, max_messages: int = 500, wait: Duration = 5) -> list[Received]:
        """The next messages, at most `max_messages`; waits up to `wait` for the first one."""
        if type(max_messages) is not int or max_messages < 1:
            raise InvalidSetting(f"max_messages={max_messages!r}: a whole number from 1 up")
        wait_ms = duration_ms(wait, name="wait")
        self._check()
        self._ack_previous()
        found = await self._take(max_messages) or await self._wait_for(max_messages, wait_ms)
        if self._settings.ack == "after":
            self._previous = found
        return found

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Received:
        if self._closing is not None:
            raise StopAsyncIteration
        self._check()
        self._ack_previous()
        found = await self._take(1) if self._fetcher.stale else self._taken(1)
        while not found:
            found = await self._wait_for(1, None)
            if self._closing is not None:
                raise StopAsyncIteration
        if self._settings.ack == "after":
            self._previous = found
        return found[0]

    async def _wait_for(self, limit: int, wait_ms: int | None) -> list[Received]:
        """Wait for messages; an empty list when the time is over, or the consumer is closed meanwhile."""
        loop = self._guard.loop
        deadline = None if wait_ms is None else loop.time() + wait_ms / 1000
        fetcher = self._fetcher
        while self._closing is None:
            if fetcher.failure is not None:
                raise self._explained_failure(fetcher.failure)
            fetcher.want(_ITERATION_ON_DELIVERY if wait_ms is None else limit)
            try:
                async with asyncio.timeout_at(deadline):
                    await fetcher.arrived.wait()
            except TimeoutError:
                return await self._take(limit)
            if self._closing is None and (found := await self._take(limit)):
                return found
        return []

    def _explained_failure(self, failure: Exception) -> Exception:
        """A member whose own group is gone is told what that means (R11)."""
        own = "" if self._joined is None else self._joined.name
        if not isinstance(failure, UnknownGroup) or base_of(own) is None:
            return failure
        found = UnknownGroup(
            f"member {self.member!r} was forgotten: its group {own!r} of topic {self.topic!r} was idle for "
            "too long, or deleted. Make a new consumer to join again; messages may have been missed",
            topic=self.topic,
            group=own,
            member=self.member,
        )
        found.__cause__ = failure
        return found

    async def _take(self, limit: int) -> list[Received]:
        """From the buffer. Where its leases have passed, ask first whether they can be renewed."""
        if self._fetcher.stale:
            await asyncio.to_thread(self._heartbeat.beat_for, self._heart)
        return self._taken(limit)

    def _taken(self, limit: int) -> list[Received]:
        fetcher = self._fetcher
        found = fetcher.unexpired(fetcher.take(limit))
        if found and fetcher.slow is not None:
            fetcher.slow.taken()
        return found

    # ---- settling ----

    async def ack(self, messages: Iterable[Received] = (), *, up_to: Received | None = None) -> None:
        """Ack these messages, or all that were handed out of that message's partition up to it."""
        if isinstance(messages, Received):
            messages = (messages,)
        try:
            runs = runs_of(messages)
        except AttributeError:
            raise UsageError("only received messages can be acked") from None
        if up_to is not None:
            runs += self._runs_up_to(up_to)
        for delivery, _, _ in runs:
            if delivery.settler is not self._settler:
                raise UsageError(
                    "these messages came from another consumer: ack them there, or with message.ack()"
                )
        await self._settler.settle(runs, "ack")

    def _runs_up_to(self, message: Received) -> list[Run]:
        at = delivery_of(message)
        runs: list[Run] = []
        for delivery in self._in_flight:
            if delivery.partition_id == at.partition_id:
                runs += [(delivery, *run) for run in delivery.handed_runs(message._position)]
        return runs or runs_of([message])

    def _ack_previous(self) -> None:
        """Mode "after": put the acks on their way; they need not be stored before handling goes on."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        if not self._previous:
            return
        previous, self._previous = self._previous, []
        if len(previous) == 1:
            waiting = self._settler.ack_soon(previous[0])
        else:
            runs = [(d, *run) for d, start, stop in runs_of(previous) for run in d.open_runs(start, stop)]
            waiting = self._settler.submit(runs, "ack")
        if waiting is not None and waiting.done is not self._acking:
            self._acking = waiting.done
            waiting.done.add_done_callback(self._previous_acked)

    def _previous_acked(self, done: asyncio.Future[None]) -> None:
        if not done.cancelled():
            self._failure = done.exception()

    # ---- life ----

    @property
    def closed(self) -> bool:
        return self._closing is not None

    def _check(self) -> None:
        self._guard.check()
        if self._closing is not None:
            raise ClosedError("this consumer is closed: make a new one with mq.consumer()")
        if self._fetching is None:
            raise UsageError("enter the consumer first: async with mq.consumer(…) as consumer")

    async def __aenter__(self) -> Self:
        self._guard.check()
        if self._fetching is not None or self._closing is not None:
            raise UsageError("a consumer is entered once: make a new one with mq.consumer()")
        who = self._who
        subscribing = self._endpoint.subscribe(
            who.topic, who.group, self._settings.wish, who.member, who.client, named=self._settings.named
        )
        info: GroupInfo = await self._explain(who.topic, subscribing)
        if info.made and embedded(self._endpoint) is None:  # a broker here has said so itself
            log.info("%s", info.settings.news(who.topic, who.group))
        self._joined, who.group, who.lease_ms = info, info.name, info.settings.lease_ms
        if info.settings.mode == "ordered":
            self._equip(info.settings.order)
        self._heartbeat.add(self._heart)
        self._fetching = self._guard.loop.create_task(self._fetcher.run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close(handled=error is None, failure=error if isinstance(error, Exception) else None)

    async def close(self, *, handled: bool = True, failure: Exception | None = None) -> None:
        """Leave the group and release what is held.

        In mode "after", what was handed out last is acked if `handled`. If its handling raised `failure`,
        a single message is retried, which counts; of a list it is not known which one was the cause.
        """
        if self._fetching is None:
            return
        if self._closing is None:
            self._closing = self._guard.loop.create_task(self._close(handled, failure))
        await asyncio.shield(self._closing)

    async def _close(self, handled: bool, failure: Exception | None) -> None:
        self._fetcher.arrived.set()  # whoever waits for messages goes on
        self._settler.hurry()  # what failed before is tried once more, within these limits
        give_up_at = self._guard.loop.time() + self._settings.limits.tuning.client.leave_s
        try:
            async with asyncio.timeout_at(give_up_at):
                await self._stop_fetching()
                await self._let_go(handled, failure)
        except (PostroomError, TimeoutError) as error:
            log.warning("member %s left in a hurry, its leases will run out: %r", self.member, error)
        finally:
            self._settler.close()
            self._heartbeat.remove(self._heart)
        with contextlib.suppress(PostroomError, TimeoutError):  # its time in the group runs out by itself
            async with asyncio.timeout_at(give_up_at):
                await asyncio.to_thread(self._heart.wait_until_quiet)
                await self._endpoint.unsubscribe(self._who.topic, self._who.group, self._who.member)

    async def _stop_fetching(self) -> None:
        assert self._fetching is not None
        await end((self._fetching,))
        dropped = self._fetcher.clear()
        if dropped and self._settings.ack == "on_delivery":
            log.warning("%d messages were settled on delivery and never handed out", dropped)

    async def _let_go(self, handled: bool, failure: Exception | None) -> None:
        if handled:
            self._ack_previous()
        elif failure is not None and len(self._previous) == 1 and self._settings.ack == "after":
            how = Verdict("retry", 0, 0, delay_ms=self._settings.limits.retry_first_ms, reason=repr(failure))
            open_runs = [(d, *run) for d, a, z in runs_of(self._previous) for run in d.open_runs(a, z)]
            self._settler.submit(open_runs, "retry", how)
        self._settler.submit(self._fetcher.to_release(), "release")
        await self._settler.drained()
        await self._fetcher.leave()
