"""A consuming process to be killed: notes each message it handled, then settles it, and notes that.

What becomes of a message is written in its value. Settles one by one or by list, in windows large and small;
releases some, so that deliveries have holes. In an ordered group it handles the messages in the order in
which it was given them, and leaves alone what stands behind a message of its key that it gave back.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import postroom
from postroom import Received

from .journal import Journal
from .patience import connected
from .values import parse

__all__ = ["consume"]

_RELEASED = 0.005
_REASON = "its value says so"


async def consume(
    url: str, shards: dict[str, str], topic: str, journal: str, group: str, ordered: bool
) -> None:
    mq = await connected(url, shards)
    notes = Journal(journal)
    while True:
        try:
            await _Consuming(mq, topic, group, ordered, notes).run()
        except postroom.StoreError as error:  # the database was away as it joined
            if not error.retriable:
                raise


class _Consuming:
    def __init__(
        self, mq: postroom.Connection, topic: str, group: str, ordered: bool, journal: Journal
    ) -> None:
        self._ordered, self._journal = ordered, journal
        self._consumer = mq.consumer(topic, group=group, window=random.choice([50, 400]))

    async def run(self) -> None:
        async with self._consumer as consumer:
            while True:
                messages = await consumer.poll(max_messages=random.choice([1, 10, 100]), wait=1)
                await self._settle(await self._handle(messages))

    async def _handle(self, messages: Sequence[Received]) -> list[Received]:
        """Returns those that were handled."""
        given_back: set[bytes | None] = set()  # keys: what follows comes again, behind the one given back
        done: list[Received] = []
        for message in messages:
            fails = parse(_value(message)).fate == "retry" and message.attempt < 3
            if self._ordered and message.key in given_back:
                continue
            if fails or random.random() < _RELEASED:
                given_back.add(message.key)
                await self._give_back(message, fails)
            else:
                self._journal.note("handled", [_value(message)])
                done.append(message)
        return done

    async def _give_back(self, message: Received, fails: bool) -> None:
        try:
            await _patiently(
                lambda: message.retry(delay=0.05, reason=_REASON) if fails else message.release()
            )
        except postroom.LeaseLost:
            pass  # somebody else has it

    async def _settle(self, done: Sequence[Received]) -> None:
        by_partition: defaultdict[int, list[Received]] = defaultdict(list)
        for message in done:
            if parse(_value(message)).fate == "dead":
                await self._noted([message], partial(message.dead, _REASON))
            elif random.random() < 0.1:
                await self._noted([message], message.ack)
            else:
                by_partition[message.partition].append(message)
        for messages in by_partition.values():
            await self._noted(messages, partial(self._consumer.ack, messages))

    async def _noted(self, messages: Sequence[Received], settle: Callable[[], Awaitable[None]]) -> None:
        """Messages of one partition, so that their offsets tell which of them were lost."""
        gone: set[int] = set()
        try:
            await _patiently(settle)
        except postroom.LeaseLost as error:
            gone = set(error.details["offsets"])
        self._journal.note("settled", [_value(m) for m in messages if m.offset not in gone])
        self._journal.note("gone", [_value(m) for m in messages if m.offset in gone])


async def _patiently(settle: Callable[[], Awaitable[None]]) -> None:
    """A message whose settling failed is still in our hands: until it is settled, nobody else gets it."""
    while True:
        try:
            return await settle()
        except postroom.StoreError as error:
            if not error.retriable:
                raise


def _value(message: Received) -> str:
    return message.value.decode()
