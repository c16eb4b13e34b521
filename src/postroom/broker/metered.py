"""A broker that counts what it is asked: around every verb of the `Endpoint`, and nothing else.

What it holds is in `figures`. Everything that is no verb (`store`, `in_thread`, `duties`, …) is the broker's
own, so that it can stand wherever the broker can. Must never change an answer or an error.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, cast

from ..endpoint.values import Beat, Held, PollReply, PollRequest, Settle, SettleReply
from ..model.delivery.delivery import Span
from ..model.messages.batch import read_header
from ..store.contract import Appended
from .access import ACTIONS
from .broker import Broker
from .metrics import Figures, group_label, topic_label

__all__ = ["figures_of", "measured", "unmeasured"]

_VERBS = ACTIONS.keys() - {"now_ms", "close"}


def measured(broker: Broker) -> Broker:
    """The same broker, counted. It looks like one to whoever has it."""
    return broker if figures_of(broker) is not None else cast(Broker, _Measured(broker, Figures()))


def unmeasured(broker: Broker) -> Broker:
    """The broker itself: what it is asked there is not counted."""
    return broker._broker if isinstance(broker, _Measured) else broker


def figures_of(broker: Broker) -> Figures | None:
    """What was counted; None: this broker is not measured."""
    return getattr(broker, "figures", None)


class _Measured:
    def __init__(self, broker: Broker, figures: Figures) -> None:
        self._broker, self.figures = broker, figures
        broker.watch(figures)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._broker, name)
        if name in _VERBS:
            found = self.__dict__[name] = partial(self._call, name, found)
        return found

    async def _call(
        self, operation: str, verb: Callable[..., Awaitable[Any]], *args: Any, **named: Any
    ) -> Any:
        began, error = time.perf_counter(), None
        try:
            return await verb(*args, **named)
        except BaseException as raised:
            error = raised
            raise
        finally:
            self.figures.ended(operation, time.perf_counter() - began, error)
            del error  # it refers to this frame

    # ---- verbs that are about messages ----

    async def append(
        self, topic: str, partition_id: int, batch: bytes, *, due_at: int = 0, **more: Any
    ) -> Appended:
        stored: Appended = await self._call(
            "append", self._broker.append, topic, partition_id, batch, due_at=due_at, **more
        )
        figures, label = self.figures, (topic_label(topic),)
        header = read_header(batch)
        repeats = header.records if stored.duplicate else len(stored.repeats)
        if repeats:
            figures.duplicates.add(label, repeats)
        if repeats < header.records:
            (figures.delayed if due_at else figures.published).add(label, header.records - repeats)
            figures.batches.add(label)
            figures.published_bytes.add(label, header.size)
        return stored

    async def poll(self, request: PollRequest) -> PollReply:
        reply: PollReply = await self._call("poll", self._broker.poll, request)
        leases = [lease for grant in reply.grants for lease in grant.leases]
        if leases:
            figures, label = self.figures, (topic_label(request.topic), group_label(request.group))
            again = sum(lease.last - lease.first + 1 for lease in leases if lease.attempt > 1)
            figures.delivered.add(label, sum(lease.last - lease.first + 1 for lease in leases))
            figures.deliveries.add(label, len(leases))
            if again:
                figures.redelivered.add(label, again)
        return reply

    async def settle(self, topic: str, group: str, parts: Sequence[Settle]) -> SettleReply:
        reply: SettleReply = await self._call("settle", self._broker.settle, topic, group, parts)
        label = (topic_label(topic), group_label(group))
        sums: dict[str, int] = {}
        for part in parts:
            if part not in reply.away:
                for verdict in part.verdicts:
                    if verdict.line is not None:  # what is parked is acked beside it, and not settled
                        sums["ack"] = sums.get("ack", 0) - verdict.line.messages
                    else:
                        sums[verdict.kind] = sums.get(verdict.kind, 0) + verdict.last - verdict.first + 1
        for kind, messages in sums.items():
            self.figures.settled.add((*label, kind), max(0, messages))
        if reply.lost:
            self.figures.lost.add(label, sum(len(spans) for _, spans in reply.lost))
        return reply

    def beat(self, beats: Sequence[Beat]) -> list[tuple[Held, tuple[Span, ...]]]:
        began, error = time.perf_counter(), None
        try:
            return self._broker.beat(beats)
        except BaseException as raised:
            error = raised
            raise
        finally:
            self.figures.ended("beat", time.perf_counter() - began, error)
            del error
