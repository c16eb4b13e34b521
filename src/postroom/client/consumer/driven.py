"""A consumer as an app drives it: messages are taken for handlers, and their verdicts travel by themselves.

Decides when verdicts leave: acks of one turn of the event loop go together, as ranges, so that they cost
next to nothing each; the settler gathers further. A verdict that the store refused is given again after a
pause for as long as the app runs, unless its group or topic is gone: then `gone` says so. A member that holds
as much as it may asks for nothing, and would never notice.

Must never give a verdict on a message that somebody settled already (a handler may settle on its own), and
never raise for a lost lease: it is logged, and the message is somebody else's by then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any, Self

from ...backoff import pause
from ...endpoint.values import Verdict
from ...errors import UnknownGroup, UnknownTopic
from ...model.policy.settings import GroupSettings
from ..app.handler import ACK, RELEASE, Outcome
from ..message import Received
from .consumer import Consumer
from .in_flight import LOST
from .settle import Run, runs_of

__all__ = ["DrivenConsumer"]

log = logging.getLogger("postroom.app")


class DrivenConsumer(Consumer):
    """Made by `Connection.consumer` and `of`."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._loop, self.tuning = self._guard.loop, self._settings.limits.tuning.client
        self._acks: list[Received] = []
        self._under_way = 0  # verdicts without an answer of the store
        self._quiet = asyncio.Event()  # none is under way
        self._quiet.set()
        self._ending = False
        self.gone: asyncio.Future[Exception] = self._loop.create_future()  # why no verdict can be stored
        self.stored = 0  # how many answers there were; to see whether something happened

    @classmethod
    def of(cls, plain: Consumer) -> Self:
        """Return the same member for an app to drive; the plain one was not entered, and is not used."""
        return cls(plain._endpoint, plain._guard, plain._heartbeat, plain._settings, plain._explain)

    @property
    def settings(self) -> GroupSettings:
        """The settings of the group as it was joined."""
        assert self._joined is not None
        return self._joined.settings

    # ---- taking ----

    async def next(self, limit: int) -> list[Received]:
        return await self.poll(limit, self.tuning.poll_s)

    @property
    def ordered(self) -> bool:
        return self._fetcher.ordered

    def serves(self, handlers: int, *, one_per_key: bool) -> None:
        """So many handlers run at once; in ordered groups each has one message of a key, or a run."""
        self._fetcher.handlers = handlers
        self._fetcher.in_order(one_per_key=one_per_key)

    def resize(self, messages: int) -> None:
        self._fetcher.resize(messages)

    def by_hand(self) -> None:
        """Fetch nothing by itself, only in `look`. To be called right after the consumer was entered."""
        assert self._fetching is not None
        self._fetching.cancel()

    async def look(self, limit: int) -> list[Received]:
        """Return what is there now, without waiting."""
        await self._fetcher.look(limit)
        return await self._take(limit)

    @property
    def passed_over(self) -> int:
        """Offsets that came and had no message in them; to see whether something happened."""
        return self._fetcher.passed_over

    def put_back(self, messages: Sequence[Received]) -> None:
        """Ordered groups: these are not begun now; they come again, in order."""
        self._fetcher.put_back(messages)

    def handled(self, messages: Sequence[Received]) -> None:
        """Messages that were settled on delivery were handled; in an ordered group their keys go on."""
        self._fetcher.handled(messages)

    def begin(self, messages: list[Received]) -> list[Received]:
        """Return those whose handling may begin now."""
        return self._fetcher.begin(messages)

    # ---- verdicts ----

    def settle(self, messages: Sequence[Received], outcome: Outcome) -> bool:
        """Put a verdict on its way for those that nobody has settled; returns whether there are any."""
        if outcome.kind == "ack":
            if not self._acks:
                self._begin()
                self._loop.call_soon(self._send_acks)
            self._acks += messages
            return True
        runs = _open_runs(messages)
        self._submit(runs, outcome)
        return bool(runs)

    def _send_acks(self) -> None:
        messages, self._acks = self._acks, []
        self._submit(_open_runs(messages), ACK)
        self._end()

    def _submit(self, runs: Sequence[Run], outcome: Outcome) -> None:
        how = Verdict(outcome.kind, 0, 0, outcome.delay_ms, outcome.at_ms, outcome.reason)
        if self.closed:
            return  # it has handed everything back
        waiting = self._settler.submit(runs, outcome.kind, how)
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
                self.gone.set_result(self._explained_failure(error))
        elif self._ending or self.closed:
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
                self.topic,
                self.group,
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
        if passing := self._fetcher.passing:
            await asyncio.wait(passing)

    # ---- life ----

    async def stop(self, at_work: Sequence[Received]) -> None:
        """Take no more, and hand back everything that is not at work."""
        await self._stop_fetching()
        acked, self._acks = self._acks, []
        self._submit(_open_runs(acked), ACK)
        self._submit(self._fetcher.to_release(at_work), RELEASE)

    async def finish(self) -> None:
        """Wait for verdicts, within limits, then leave the group; what is left is handed back."""
        self._ending = True
        self._settler.hurry()
        try:
            async with asyncio.timeout(self.tuning.last_settles_s):
                await self.settled()
        except TimeoutError:
            log.error("%s/%s left before all was stored", self.topic, self.group)
        await self.close(handled=False)


def _open_runs(messages: Sequence[Received]) -> list[Run]:
    return [(d, *run) for d, start, stop in runs_of(messages) for run in d.open_runs(start, stop)]
