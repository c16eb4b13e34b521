"""The act about elastic order: a topic is split and merged while it is written and read (R25).

Senders and an ordered group never stop for it. The audit knows which trade of which key is at which place,
whatever version of the route put it there: partitions have numbers that are never used again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import postroom

from .cast import Cast
from .journals import write_journals
from .ledger import Place, audit, out_of_order
from .scene import Scene, until

__all__ = ["change_route"]

_GROUP = "watch"
_SENDERS = 4
_ROUNDS = 5  # of a sender's keys, in one list
_PAUSE_S = 0.01  # of a sender, between two lists


async def change_route(scene: Scene, mq: postroom.Connection, cast: Cast) -> None:
    scene.stage.heading("6  Split and merged while everybody is at work")
    topic, scale, say = scene.topic("trades"), scene.scale, scene.stage.say
    await mq.create_topic(topic, partitions=2)
    await mq.create_group(topic, _GROUP, mode="ordered")
    members = [await cast.start(topic, _GROUP, f"{_GROUP}-{n}") for n in (1, 2)]
    say(f"{_SENDERS} senders, {scale.trade_keys} keys, and an ordered group of two processes. Nobody stops.")

    async def at_work() -> bool:
        for member in members:
            member.refuse_failure()
        return any(member.handled_some for member in members)

    async def drained() -> bool:
        await at_work()
        return (await mq.lag(topic, _GROUP)).total.messages == 0

    sending = _Sending(mq, topic, [f"key-{n}" for n in range(scale.trade_keys)])
    async with sending.under_way():
        await until(at_work, "the ordered group was given nothing")
        for change in (_split, _split, _merge):
            await asyncio.sleep(scale.between_s)
            say(await change(mq, topic))
            scene.figures.changes += 1
        await asyncio.sleep(scale.between_s)
    await until(drained, "the ordered group did not finish")
    for member in members:
        await member.stop()
    ledgers = [member.ledger for member in members]
    scene.figures.trades = audit(set(sending.numbers), ledgers)
    scene.figures.trades_out_of_order = out_of_order(sending.numbers, ledgers)
    scene.figures.longest_send_ms = sending.longest_s * 1000
    write_journals(scene.folder, sending.numbers, ledgers)
    _report(scene)


def _report(scene: Scene) -> None:
    figures, say = scene.figures, scene.stage.say
    trades, wrong = figures.trades, figures.trades_out_of_order
    say(
        f"Handled: **{trades.handled:,} of {trades.sent:,}**. The longest that a send had to wait: "
        f"**{figures.longest_send_ms:.0f} ms**."
    )
    verdict = f"no, {wrong:,} were not" if wrong else "yes"
    say(
        f"**{trades.sent:,} messages of {scene.scale.trade_keys} keys, {figures.changes} changes of the "
        f"route, in order: {verdict}.**"
    )


# ---- changes ----


async def _split(mq: postroom.Connection, topic: str) -> str:
    """The widest partition."""
    old = max((await mq.route(topic)).ranges, key=lambda piece: piece.slots)
    seconds, route = await _timed(lambda: mq.split(topic, old.partition))
    return f"**Split** {old} in {seconds * 1000:.0f} ms: {_pieces(route)}."


async def _merge(mq: postroom.Connection, topic: str) -> str:
    one, other = (await mq.route(topic)).ranges[:2]
    seconds, route = await _timed(lambda: mq.merge(topic, one.partition, other.partition))
    numbers = f"{one.partition} and {other.partition}"
    return f"**Merged** partitions {numbers} in {seconds * 1000:.0f} ms: {_pieces(route)}."


async def _timed(
    change: Callable[[], Coroutine[Any, Any, postroom.Route]],
) -> tuple[float, postroom.Route]:
    began = time.perf_counter()
    route = await change()
    return time.perf_counter() - began, route


def _pieces(route: postroom.Route) -> str:
    return "now " + ", ".join(str(piece.partition) for piece in route.ranges)


# ---- load ----


class _Sending:
    """Every key belongs to one sender, so that its messages have an order."""

    def __init__(self, mq: postroom.Connection, topic: str, keys: list[str]) -> None:
        self._mq, self._topic, self._keys = mq, topic, keys
        self._stopped = False
        self.numbers: dict[Place, tuple[str, int]] = {}
        self.longest_s = 0.0

    @asynccontextmanager
    async def under_way(self) -> AsyncIterator[None]:
        """Leaving the block lets the sends that are under way finish."""
        async with asyncio.TaskGroup() as senders:
            for n in range(_SENDERS):
                senders.create_task(self._send(self._keys[n::_SENDERS]))
            try:
                yield
            finally:
                self._stopped = True

    async def _send(self, keys: list[str]) -> None:
        first = 0
        while not self._stopped:
            named = [(key, first + round) for round in range(_ROUNDS) for key in keys]
            messages = [postroom.Message(b'{"trade": %d}' % number, key=key) for key, number in named]
            began = time.perf_counter()
            receipts = await self._mq.send_many(self._topic, messages)
            self.longest_s = max(self.longest_s, time.perf_counter() - began)
            self.numbers |= {(r.partition, r.offset): n for r, n in zip(receipts, named, strict=True)}
            first += _ROUNDS
            await asyncio.sleep(_PAUSE_S)
