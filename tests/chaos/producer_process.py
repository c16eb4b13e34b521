"""A producing process to be killed: sends numbered messages for ever, and notes each confirmed one.

It sends one by one, by list, or posts without waiting, so that several batches are under way when it dies.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from datetime import UTC, datetime

import postroom

from .journal import Journal
from .patience import connected
from .values import Value

__all__ = ["produce"]

_KEYS = 8
_PATIENCE_S = 4.0
_FATES = ("retry", "dead", *("ack",) * 48)


async def produce(
    url: str,
    shards: dict[str, str],
    topic: str,
    journal: str,
    name: str,
    run: int,
    delays: list[float],
    pause_s: float,
    keyless: bool,
) -> None:
    """`delays`: shortest and longest, in seconds; empty: everything is due at once."""
    mq = await connected(url, shards)
    producing = _Producing(mq, topic, name, run, Journal(journal), delays)
    await (producing.run_keyless(pause_s) if keyless else producing.run(pause_s))


class _Producing:
    def __init__(
        self, mq: postroom.Connection, topic: str, name: str, run: int, journal: Journal, delays: list[float]
    ) -> None:
        self._mq, self._topic, self._name, self._run = mq, topic, name, run
        self._journal, self._delays = journal, delays
        self._numbers: Counter[str] = Counter()

    async def run(self, pause_s: float) -> None:
        producer = self._mq.producer(self._topic, batch_messages=20)
        while True:
            messages = [self._message() for _ in range(random.choice([1, 1, 7, 60]))]
            self._journal.note("sending", _values(messages))
            try:
                if random.random() < 0.5:
                    await self._mq.send_many(self._topic, messages)
                    self._journal.note("confirmed", _values(messages))
                else:
                    await self._post(producer, messages)
            except postroom.PostroomError as error:  # out of time, or away before the route was known
                if not error.retriable and not isinstance(error, postroom.UnknownFate):
                    raise
                self._journal.note("failed", _values(messages))
            await asyncio.sleep(random.random() * pause_s)

    async def run_keyless(self, pause_s: float) -> None:
        """As a plain program does: `send`, and the next one when the receipt is there."""
        while True:
            message = self._message()
            self._journal.note("sending", _values([message]))
            try:
                await self._mq.send(self._topic, message.value, timeout=_PATIENCE_S)
                self._journal.note("confirmed", _values([message]))
            except postroom.SendTimeout as error:
                self._journal.note("failed" if "stored" in error.details else "unknown", _values([message]))
            await asyncio.sleep(random.random() * pause_s)

    async def _post(self, producer: postroom.Producer, messages: list[postroom.Message]) -> None:
        """Each is noted when its own receipt comes. Whatever fails, nothing of them is under way afterwards:
        a list goes by another producer, and might overtake them."""
        try:
            receipts = [(await producer.post(**_arguments(message)), message) for message in messages]
            for receipt, message in receipts:
                await receipt
                self._journal.note("confirmed", _values([message]))
        finally:
            await producer.flush()

    def _message(self) -> postroom.Message:
        key = f"{self._name}.k{random.randrange(_KEYS)}"
        self._numbers[key] += 1
        due_ms = int(time.time() * 1000 + 1000 * random.uniform(*self._delays)) if self._delays else 0
        value = Value(key, self._run, self._numbers[key], random.choice(_FATES), due_ms)
        at = datetime.fromtimestamp(due_ms / 1000, UTC) if due_ms else None
        return postroom.Message(str(value).encode(), key=key, at=at)


def _values(messages: list[postroom.Message]) -> list[str]:
    return [bytes(message.value).decode() for message in messages]


def _arguments(message: postroom.Message) -> dict[str, object]:
    return {"value": message.value, "key": message.key, "at": message.at}
