"""What a subscription takes from its consumer, and how its verdicts go back.

The only place of the app that knows the inside of a consumer. Decides when verdicts leave: acks of one turn
of the event loop go together, as ranges, so that they cost next to nothing each; the consumer's settler
gathers further. A verdict that the store refused is given again after a pause for as long as the app runs,
unless its group or topic is gone: then `gone` says so. Full hands ask for nothing, and would never notice.

Must never give a verdict on a message that somebody settled already (a handler may settle on its own), and
never raise for a lost lease: it is logged, and the message is somebody else's by then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from functools import partial

from ...backoff import pause
from ...endpoint.endpoint import Verdict
from ...errors import UnknownGroup, UnknownTopic
from ..app.handler import ACK, RELEASE, Outcome
from ..message import Received
from .consumer import Consumer
from .in_flight import LOST, HeldDelivery
from .ordered.fetch import OrderedFetcher
from .settle import Run, delivery_of, runs_of

__all__ = ["Intake"]

log = logging.getLogger("postroom.app")

_WAIT_SECONDS = 30  # how long one poll waits; the next follows at once
_SETTLE_SECONDS = 10.0  # at the end, verdicts are waited for no longer than this


class Intake:
    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._loop = asyncio.get_running_loop()
        self._acks: list[Received] = []
        self._under_way = 0  # verdicts without an answer of the store
        self._quiet = asyncio.Event()  # none is under way
        self._quiet.set()
        self._ending = False
        self.gone: asyncio.Future[Exception] = (
            self._loop.create_future()
        )  # why no verdict can be stored any more
        self.stored = 0  # how many answers there were; to see whether something happened

    # ---- taking ----

    async def next(self, limit: int) -> list[Received]:
        return await self._consumer.poll(limit, _WAIT_SECONDS)

    @property
    def ordered(self) -> bool:
        return isinstance(self._consumer._fetcher, OrderedFetcher)

    def in_order(self, *, one_per_key: bool) -> None:
        """Ordered groups: whether a key has one message at work at a time, or a run of them."""
        fetcher = self._consumer._fetcher
        if isinstance(fetcher, OrderedFetcher):
            fetcher.outlet.one_per_key, fetcher.outlet.told_of_handling = one_per_key, True

    def resize(self, messages: int) -> None:
        self._consumer._fetcher.resize(messages)

    def by_hand(self) -> None:
        """Fetch nothing by itself, only in `look`. To be called right after the consumer was entered."""
        assert self._consumer._fetching is not None
        self._consumer._fetching.cancel()

    async def look(self, limit: int) -> list[Received]:
        """What is there now, without waiting."""
        await self._consumer._fetcher.look(limit)
        return await self._consumer._take(limit)

    @property
    def passed_over(self) -> int:
        """Offsets that came and had no message in them; to see whether something happened."""
        return self._consumer._fetcher.passed_over

    def put_back(self, messages: Sequence[Received]) -> None:
        """Ordered groups: these are not begun now; they come again, in order."""
        fetcher = self._consumer._fetcher
        if messages and isinstance(fetcher, OrderedFetcher):
            fetcher.outlet.put_back(messages)

    def still_open(self, messages: list[Received]) -> list[Received]:
        """Without those that were lost or taken back before they were begun."""
        return [m for m in messages if delivery_of(m).state[m._position - delivery_of(m).first] < LOST]

    def handled(self, messages: Sequence[Received]) -> None:
        """Messages that were settled on delivery were handled; in an ordered group their keys go on."""
        fetcher = self._consumer._fetcher
        if isinstance(fetcher, OrderedFetcher):
            fetcher.outlet.handled(messages)

    def handlers(self, count: int) -> None:
        """So many run at once."""
        self._consumer._fetcher.lanes.has_handlers(count)

    def begin(self, messages: list[Received]) -> list[Received]:
        """Without those whose source turned out to be slow meanwhile: they are set aside (R42)."""
        lanes = self._consumer._fetcher.lanes
        if not lanes.watching:
            return messages
        messages = lanes.without_slow(messages)
        lanes.began(messages)
        return messages

    # ---- verdicts ----

    def settle(self, messages: Sequence[Received], outcome: Outcome) -> None:
        """Put a verdict on its way, for those of the messages that nobody has settled."""
        if outcome.kind == "ack":
            if not self._acks:
                self._begin()
                self._loop.call_soon(self._send_acks)
            self._acks += messages
        else:
            self._submit(_open_runs(messages), outcome)

    def _send_acks(self) -> None:
        messages, self._acks = self._acks, []
        self._submit(_open_runs(messages), ACK)
        self._end()

    def _submit(self, runs: Sequence[Run], outcome: Outcome) -> None:
        how = Verdict(outcome.kind, 0, 0, outcome.delay_ms, outcome.at_ms, outcome.reason)
        if self._consumer.closed:
            return  # it has handed everything back
        waiting = self._consumer._settler.submit(runs, outcome.kind, how)
        if waiting is not None:
            self._begin()
            waiting.done.add_done_callback(partial(self._answered, runs, outcome))

    def _answered(self, runs: Sequence[Run], outcome: Outcome, done: asyncio.Future[None]) -> None:
        error = None if done.cancelled() else done.exception()
        self.stored += 1
        if error is None:
            self._tell_lost(runs)
            self._end()
        elif isinstance(error, UnknownGroup | UnknownTopic):
            self._end()  # nobody is left to be told
            if not self.gone.done():
                self.gone.set_result(self._consumer._explained_failure(error))
        elif self._ending or self._consumer.closed:
            log.error("%s was not stored, it will be delivered again: %r", outcome.kind, error)
            self._end()
        else:
            log.warning("%s was not stored, trying again: %r", outcome.kind, error)
            self._loop.call_later(pause(8), self._repeat, runs, outcome)

    def _repeat(self, runs: Sequence[Run], outcome: Outcome) -> None:
        still = [(d, *run) for d, start, stop in runs for run in d.open_runs(start, stop)]
        self._submit(still, outcome)
        self._end()

    def _tell_lost(self, runs: Sequence[Run]) -> None:
        lost = sum(d.state.count(LOST, start, stop) for d, start, stop in runs)
        if lost:
            log.warning(
                "the lease on %d messages of %s/%s ended before they were settled: somebody else may handle "
                "them again; a longer lease helps",
                lost,
                self._consumer.topic,
                self._consumer.group,
            )

    def _begin(self) -> None:
        self._under_way += 1
        self._quiet.clear()

    def _end(self) -> None:
        self._under_way -= 1
        if not self._under_way:
            self._quiet.set()

    async def settled(self) -> None:
        """Wait until the store has answered every verdict."""
        await self._quiet.wait()
        if passing := self._consumer._fetcher.passing:
            await asyncio.wait(passing)

    # ---- life ----

    async def stop(self, at_work: Iterable[Received]) -> None:
        """Take no more, and hand back everything that is not at work."""
        await self._consumer._stop_fetching()
        acked, self._acks = self._acks, []
        self._submit(_open_runs(acked), ACK)
        if self.ordered:
            return  # the next holder gets it when the partition is handed over
        busy: dict[HeldDelivery, list[tuple[int, int]]] = {}
        for delivery, start, stop in runs_of(at_work):
            busy.setdefault(delivery, []).append((start, stop))
        runs: list[Run] = []
        for delivery in self._consumer._hands:
            for free in _gaps(busy.get(delivery, []), len(delivery.state)):
                runs += [(delivery, *run) for run in delivery.open_runs(*free)]
        self._submit(runs, RELEASE)

    async def close(self) -> None:
        """Wait for verdicts, within limits, then leave the group; what is left is handed back."""
        self._ending = True
        self._consumer._settler.hurry()
        try:
            async with asyncio.timeout(_SETTLE_SECONDS):
                await self.settled()
        except TimeoutError:
            log.error("%s/%s left before all was stored", self._consumer.topic, self._consumer.group)
        await self._consumer.close(handled=False)


def _open_runs(messages: Sequence[Received]) -> list[Run]:
    return [(d, *run) for d, start, stop in runs_of(messages) for run in d.open_runs(start, stop)]


def _gaps(taken: list[tuple[int, int]], end: int) -> list[tuple[int, int]]:
    """What of range(end) is not taken."""
    found, at = [], 0
    for start, stop in sorted(taken):
        found.append((at, start))
        at = stop
    return [(start, stop) for start, stop in [*found, (at, end)] if start < stop]
