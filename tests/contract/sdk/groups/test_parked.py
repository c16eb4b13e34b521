"""A failing key holds its own key only, however much waits behind it (R23, I27).

The window is small, so that a few hundred messages are many. What waits is in the store: the member that
holds the partition has hardly more in its hands than its window.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict

import pytest

from postroom import BrokerUnavailable, Connection, Consumer, LeaseLost, Message, Received
from postroom.clock import ManualClock
from tests.contract.stores import Open, everywhere

WINDOW = 20
BAD = 400  # messages of the failing key behind the first
OTHERS = 300


class Book:
    """What was handled, and whether each key was in order and nothing came twice."""

    def __init__(self) -> None:
        self.handled: dict[bytes | None, list[int]] = defaultdict(list)

    def note(self, message: Received) -> None:
        number = int(message.value)
        line = self.handled[message.key]
        assert not line or line[-1] < number, f"{message.key!r}: {number} after {line[-1]}"
        line.append(number)

    def count(self, *, bad: bool) -> int:
        return sum(len(found) for key, found in self.handled.items() if (key == b"bad") == bad)


async def fill(mq: Connection, *, start: int = 0, bad: int = BAD, others: int = OTHERS) -> None:
    """The failing key among twenty others, one after the other and in long runs."""
    keys = ["bad"] * (bad // 2)
    for at in range(others):
        keys += [f"k{at % 20}"] + ["bad"] * (at < bad - bad // 2)
    await mq.send_many("orders", [Message(b"%d" % (start + at), key=key) for at, key in enumerate(keys)])


async def work(
    consumer: Consumer, book: Book, until: int, *, failing: bool, most: list[int] | None = None
) -> None:
    """Handle until so many of the other keys are done; the first message of the failing key fails."""
    while (book.count(bad=False) if failing else book.count(bad=True)) < until:
        messages = await consumer.poll(7, wait=20)
        assert messages, f"{book.count(bad=False)} and {book.count(bad=True)} were handled"
        if most is not None:
            most.append(consumer.in_hand)
        for message in messages:
            with contextlib.suppress(LeaseLost):  # taken back, behind one of its key that was retried
                if failing and message.key == b"bad":
                    await message.retry(3600, reason="no")
                else:
                    await message.ack()
                    book.note(message)


@pytest.fixture
async def mq(connection: Connection) -> Connection:
    await connection.create_topic("orders", partitions=1)
    return connection


@pytest.mark.slow("any number is thousands")
@everywhere
@pytest.mark.parametrize("exhausted", ["stop", "dead"])
async def test_any_number_of_messages_behind_a_failing_one_holds_nobody_up(
    mq: Connection, clock: ManualClock, exhausted: str
) -> None:
    attempts = 1 if exhausted == "stop" else 9
    await mq.create_group(
        "orders", "billing", mode="ordered", exhausted=exhausted, max_attempts=attempts, max_hold="2d"
    )
    await fill(mq)
    book, most = Book(), list[int]()
    async with mq.consumer("orders", group="billing", window=WINDOW) as consumer:
        await work(consumer, book, OTHERS, failing=True, most=most)
        total = (await mq.lag("orders", "billing")).total
        assert total.messages == BAD and total.parked >= BAD - 1 - 6 * WINDOW
        assert max(most) < 8 * WINDOW, "memory grows with what waits"
        clock.advance(7200)
        if exhausted == "stop":
            assert total.stopped == 1 and await mq.redrive("orders", "billing") == 1
        await work(consumer, book, BAD, failing=False)
    total = (await mq.lag("orders", "billing")).total
    assert (total.messages, total.parked) == (0, 0)
    assert book.count(bad=True) == BAD


@pytest.mark.slow("works for seconds")
@everywhere
async def test_the_next_holder_goes_on_where_the_line_is(
    mq: Connection, opened: Open, clock: ManualClock
) -> None:
    """A takeover with a line in the store, one in the middle of going on, and a split and a merge."""
    await mq.create_group("orders", "billing", mode="ordered", max_attempts=99, max_hold="9d")
    await fill(mq)
    book = Book()
    async with mq.consumer("orders", group="billing", window=WINDOW) as consumer:
        await work(consumer, book, OTHERS // 2, failing=True)
    async with opened() as other, other.consumer("orders", group="billing", window=WINDOW) as consumer:
        await work(consumer, book, OTHERS, failing=True)
        await mq.split("orders", 0)
        await fill(mq, start=10_000, bad=50, others=40)
        first, second = (piece.partition for piece in (await mq.route("orders")).ranges)
        await mq.merge("orders", first, second)
        await fill(mq, start=20_000, bad=50, others=40)
        clock.advance(7200)
        await work(consumer, book, BAD // 3, failing=False)
    async with mq.consumer("orders", group="billing", window=WINDOW) as consumer:
        await work(consumer, book, BAD + 100, failing=False)
        while book.count(bad=False) < OTHERS + 80:
            for message in await consumer.poll(wait=20):
                await message.ack()
                book.note(message)
    total = (await mq.lag("orders", "billing")).total
    assert (total.messages, total.parked) == (0, 0)


async def test_settled_on_delivery_behind_what_was_parked(mq: Connection, clock: ManualClock) -> None:
    await mq.create_group("orders", "billing", mode="ordered", max_attempts=9, max_hold="2d")
    await fill(mq)
    book = Book()
    async with mq.consumer("orders", group="billing", window=WINDOW) as consumer:
        await work(consumer, book, OTHERS, failing=True)
    clock.advance(7200)
    await fill(mq, start=10_000, bad=20, others=10)
    async with mq.consumer("orders", group="billing", window=WINDOW, ack="on_delivery") as consumer:
        while book.count(bad=True) < BAD + 20 or book.count(bad=False) < OTHERS + 10:
            messages = await consumer.poll(wait=20)
            assert messages
            for message in messages:
                book.note(message)
    assert (await mq.lag("orders", "billing")).total.messages == 0


async def test_a_lost_answer_loses_nothing_of_a_line(mq: Connection, clock: ManualClock) -> None:
    """I6."""
    await mq.create_group("orders", "billing", mode="ordered", max_attempts=9, max_hold="2d")
    await fill(mq)
    book, endpoint, asked = Book(), mq._endpoint, 0
    unpark = endpoint.unpark

    async def loses(request: object) -> object:
        nonlocal asked
        reply = await unpark(request)  # type: ignore[arg-type]
        asked += 1
        if asked % 2:
            raise BrokerUnavailable("the answer was lost")
        return reply

    endpoint.unpark = loses  # type: ignore[method-assign, assignment]
    async with mq.consumer("orders", group="billing", window=WINDOW) as consumer:
        await work(consumer, book, OTHERS, failing=True)
        clock.advance(7200)
        await work(consumer, book, BAD, failing=False)
    assert asked > 10 and (await mq.lag("orders", "billing")).total.messages == 0


async def test_a_fault_while_it_is_taken_out_is_the_consumers(mq: Connection, clock: ManualClock) -> None:
    await mq.create_group("orders", "billing", mode="ordered", max_attempts=9, max_hold="2d")
    await fill(mq)
    book, endpoint = Book(), mq._endpoint

    async def fails(request: object) -> object:
        raise ZeroDivisionError

    async with mq.consumer("orders", group="billing", window=WINDOW) as consumer:
        await work(consumer, book, OTHERS, failing=True)
        endpoint.unpark = fails  # type: ignore[method-assign, assignment]
        clock.advance(7200)
        with pytest.raises(ZeroDivisionError):
            await work(consumer, book, BAD, failing=False)
