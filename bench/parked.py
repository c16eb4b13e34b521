"""What a failing key costs the others: their rate, and memory, while a million messages wait behind it.

python -m bench.parked [--waiting 1000000] [--others 100000] [--url sqlite:///…]

One partition. The first message of the key `bad` fails and stops its key; so many of that key wait behind it.
Measured of the other keys, by lists and by a handler that takes one message at a time:

- `after`: what comes behind the million, against the same messages where nothing fails;
- `among`: one message of the failing key for each of the others, against the same where none fails.

Goals: 0.8 of the rate, and memory that stays flat. Each pair is measured in turn, so that a noisy machine
disturbs both.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import postroom
from postroom import Connection, LeaseLost, Message

GOAL = 0.8
_LIST = 1000
_KEYS = 50
_VALUE = b"x" * 100
_ROUNDS = 3


@dataclass(frozen=True)
class Rate:
    per_s: float
    grown_mb: float
    parked: int


async def fill(mq: Connection, topic: str, waiting: int, others: int, *, among: bool, bad: bytes) -> None:
    await mq.create_topic(topic, partitions=1)
    await mq.send(topic, bad, key="bad")
    ahead = 0 if among else waiting
    for start in range(0, ahead, _LIST):
        await mq.send_many(topic, [Message(_VALUE, key="bad")] * min(_LIST, ahead - start))
    mixed = [Message(_VALUE, key="bad" if among and at % 2 else f"k{at // 2 % _KEYS}") for at in range(_LIST)]
    for _ in range(0, others * (2 if among else 1), _LIST):
        await mq.send_many(topic, mixed)


async def by_list(mq: Connection, topic: str, others: int) -> float:
    """Seconds from the first of the other keys to the last; lists are polled and acked."""
    done, began = 0, 0.0
    async with mq.consumer(topic, group="g", mode="ordered", exhausted="stop", max_attempts=1) as consumer:
        while done < others:
            messages = await consumer.poll(500, wait=30)
            failed = [m for m in messages if m.value == b"poison"]
            for message in failed:
                await message.retry(reason="no")
            fine = [m for m in messages if not (failed and m.key == b"bad")]
            with contextlib.suppress(LeaseLost):
                await consumer.ack(fine)
            found = sum(m.key != b"bad" for m in fine)
            began = began or (time.perf_counter() if found else 0.0)
            done += found
        return time.perf_counter() - began


async def by_handler(mq: Connection, topic: str, others: int) -> float:
    app, done, times = postroom.App(mq), asyncio.Event(), list[float]()

    @app.subscribe(topic, group="g", mode="ordered", exhausted="stop", max_attempts=1, concurrency=16)
    async def handle(message: postroom.Received) -> None:
        if message.value == b"poison":
            raise ValueError("no")
        if message.key != b"bad":
            times.append(time.perf_counter())
            if len(times) >= others:
                done.set()

    async with app:
        await done.wait()
    return times[-1] - times[0]


async def rate(
    mq: Connection, topic: str, waiting: int, others: int, *, handler: bool, among: bool, fails: bool
) -> Rate:
    await fill(mq, topic, waiting if fails else 0, others, among=among, bad=b"poison" if fails else _VALUE)
    before = _resident_mb()
    spent = await (by_handler if handler else by_list)(mq, topic, others)
    grown = _resident_mb() - before
    parked = (await mq.lag(topic, "g")).total.parked
    await mq.delete_topic(topic)
    return Rate(others / spent, grown, parked)


async def compare(
    url: str, waiting: int, others: int
) -> AsyncIterator[tuple[str, str, list[Rate], list[Rate]]]:
    async with postroom.connect(url, migrate=True) as mq:
        for among in (False, True):
            for handler in (False, True):
                count = others // 5 if handler else others
                free, failing = list[Rate](), list[Rate]()
                for turn in range(_ROUNDS):
                    for found, fails in ((free, False), (failing, True)):
                        name = f"bench-{among:d}{handler:d}{turn}{fails:d}"
                        found.append(
                            await rate(mq, name, waiting, count, handler=handler, among=among, fails=fails)
                        )
                yield "among" if among else "after", "handler" if handler else "lists", free, failing


def _resident_mb() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def _median(rates: Sequence[Rate]) -> float:
    return sorted(rate.per_s for rate in rates)[len(rates) // 2]


async def main(url: str, waiting: int, others: int) -> None:
    print(
        f"{'others':6} {'by':8} {'nothing fails':>14} {'a key fails':>12} {'ratio':>6} {'parked':>10}  memory"
    )
    async for where, how, free, failing in compare(url, waiting, others):
        ratio = _median(failing) / _median(free)
        grown = max(rate.grown_mb for rate in failing)
        print(
            f"{where:6} {how:8} {_median(free):12,.0f}/s {_median(failing):10,.0f}/s {ratio:6.2f} "
            f"{max(rate.parked for rate in failing):10,}  {grown:+.0f} MB",
            flush=True,
        )


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--waiting", type=int, default=1_000_000)
    parser.add_argument("--others", type=int, default=100_000)
    parser.add_argument("--url", default="")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(given.url or f"sqlite:///{folder}/queue.db", given.waiting, given.others))
