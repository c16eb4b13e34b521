"""One side of a measurement in a process of its own: it connects, says so, waits for the word, and measures.

python -m bench.peers.worker '{"peer": "bench.peers.kafka:Kafka", "do": "publish", "address": …}'

On stdout: a line "ready", then the figures as one line of JSON. A line on stdin is the word to begin.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Literal

import msgspec
import uvloop

from ..latency import RATE
from .peer import Peer, Publisher, Taker

__all__ = ["Figures", "Task"]

STAMP = 20  # digits of CLOCK_MONOTONIC in nanoseconds: one clock for all processes of a machine
JOINING_S = 10.0
WARMING = 10  # the first tenth of a steady run is not counted


@dataclass(frozen=True)
class Task:
    peer: str  # "module:class", so that only its client is imported
    do: Literal["publish", "pace", "drain", "follow", "receive"]
    address: str
    queue: str
    size: int  # bytes of a message
    seconds: float
    most: int = sys.maxsize  # messages a taker takes


@dataclass(frozen=True)
class Figures:
    messages: int
    seconds: float
    cpu_s: float = 0.0
    waits: list[float] = field(default_factory=list)  # seconds from the call to the message


async def publish(task: Task, peer: Peer, publisher: Publisher) -> Figures:
    """As fast as the client can, `at_once` calls in flight; what is confirmed counts."""
    values = [os.urandom(task.size // 2).hex().encode() for _ in range(peer.batch)]
    begun, confirmed = time.perf_counter(), 0

    async def one_after_another() -> None:
        nonlocal confirmed
        while time.perf_counter() - begun < task.seconds:
            count = await publisher.publish(values)  # apart: the sum is read after the wait
            confirmed += count

    await asyncio.gather(*(one_after_another() for _ in range(peer.at_once)))
    return Figures(confirmed, time.perf_counter() - begun)


async def pace(task: Task, publisher: Publisher) -> Figures:
    """One message a millisecond; calls start on time whether or not earlier ones are done."""
    begun = time.perf_counter()
    calls = []

    async def one() -> int:
        return await publisher.publish([f"{time.monotonic_ns():0{STAMP}}".ljust(task.size).encode()])

    for i in range(int(task.seconds * RATE)):
        ahead = begun + i / RATE - time.perf_counter()
        if ahead > 0:
            await asyncio.sleep(ahead)
        calls.append(asyncio.create_task(one()))
    return Figures(sum(await asyncio.gather(*calls)), time.perf_counter() - begun)


class Taking:
    """Takes and acks. With a backlog the clock starts when the first messages are here, which then do not
    count: how long it took to join is no part of the rate. Beside a producer it starts with the word."""

    def __init__(self, task: Task, peer: Peer, taker: Taker) -> None:
        self._task, self._peer, self._taker = task, peer, taker
        self._acks: set[asyncio.Task[None]] = set()
        self._acked, self._last_ack = 0, 0.0
        self._waits: list[float] = []

    async def run(self) -> Figures:
        first, taken, begun = 0, 0, time.perf_counter()
        until = begun + self._task.seconds + (JOINING_S if self._task.do == "drain" else 0)
        while taken < self._task.most and time.perf_counter() < until:
            values, token = await self._taker.take()
            self._look_at(values)
            taken += len(values)
            if not values:
                continue
            if self._task.do == "drain" and not first:
                first, begun = taken, time.perf_counter()
                until = begun + self._task.seconds
            await self._start_ack(token, len(values))
        await asyncio.gather(*self._acks)
        if self._acked == first and self._task.do == "drain":
            raise RuntimeError(f"took {taken} messages, in one go or none: too few for a rate")
        ended = (
            self._last_ack or time.perf_counter()
        )  # a taker that got nothing beside a producer has a rate of 0
        return Figures(self._acked - first, ended - begun, waits=self._waits)

    def _look_at(self, values: list[bytes]) -> None:
        now = time.monotonic_ns()
        if any(len(value) != self._task.size for value in values):
            raise RuntimeError("a message came with another length than it was sent with")
        if self._task.do == "receive":
            self._waits += [(now - int(value[:STAMP])) / 1e9 for value in values]

    async def _start_ack(self, token: object, count: int) -> None:
        """Beside the next `take`, but no more of them than the contender says is good."""
        call = asyncio.create_task(self._ack(token, count))
        self._acks.add(call)
        while len(self._acks) >= self._peer.acks_at_once:
            done, self._acks = await asyncio.wait(self._acks, return_when=asyncio.FIRST_COMPLETED)
            for call in done:
                call.result()

    async def _ack(self, token: object, count: int) -> None:
        await self._taker.ack(token)
        self._acked, self._last_ack = self._acked + count, time.perf_counter()


async def work(task: Task) -> Figures:
    """A backlog is taken by one who comes after it: nothing was fetched before the clock runs."""
    module, _, kind = task.peer.partition(":")
    peer: Peer = getattr(import_module(module), kind)()
    end: Publisher | Taker
    if task.do in ("publish", "pace"):
        end = publisher = await peer.publisher(task.address, task.queue, paced=task.do == "pace")
        await _word()
        doing = publish(task, peer, publisher) if task.do == "publish" else pace(task, publisher)
    else:
        if task.do == "drain":
            await _word()
        end = taker = await peer.taker(task.address, task.queue)
        if task.do != "drain":
            await _word()
        doing = Taking(task, peer, taker).run()
    cpu = time.process_time()
    figures = await doing
    cpu = time.process_time() - cpu
    await end.close()
    return replace(figures, cpu_s=cpu)


async def _word() -> None:
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(work(msgspec.json.decode(sys.argv[1], type=Task)))
    print(msgspec.json.encode(found).decode(), flush=True)
