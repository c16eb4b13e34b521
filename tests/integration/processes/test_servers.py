"""Processes on one database server, with no broker between them: many at once, and killed at any moment (R8).

The same promises as on a file (`test_store`), kept here by the server's locks.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

import postroom
from postroom.model.policy.settings import GroupSettings, TopicSettings
from postroom.store.contract import Store
from postroom.testing.store_contract.harness import (
    acks,
    append,
    ask,
    batch,
    partitions,
    read_all,
    spans,
    values,
)
from tests.integration.processes.children import (
    CONTEXT,
    POINTS,
    Connection,
    child,
    die_in,
    drained,
    numbered,
    received,
)
from tests.ready import Ground, both, opened
from tests.servers.server import Server

WRITERS, BATCHES, KILLS = 4, 60, 12


@pytest.fixture
def place(ground: Ground) -> int:
    store = ground.store()
    store.catalog.create_topic("orders", TopicSettings(), 1)
    store.catalog.create_group("orders", "billing", GroupSettings())
    return partitions(store.catalog.topic("orders"))[0]


# ---- killed at any moment (I3, R1) ------------------------------------------------------------------------


def append_for_ever(url: str, place: int, number: int, pipe: Connection) -> None:
    store = opened(url)
    while True:
        done = append(store, place, numbered(number))[0]
        pipe.send((number, done.base_offset, done.duplicate))
        number += 1


def test_a_producer_killed_at_random_loses_and_doubles_nothing(ground: Ground, place: int) -> None:
    """Each successor repeats the batch whose answer its predecessor did not live to see."""
    draw = random.Random(1)
    told: list[int] = []
    for _ in range(KILLS):
        with child(append_for_ever, ground.url, place, len(told)) as (process, pipe):
            answers = [received(pipe)]
            time.sleep(draw.random() * 0.05)
            process.kill()
            answers += drained(pipe)
        for number, offset, _ in answers:
            assert number == len(told)
            told.append(offset)
    kept = [(piece.base_offset, values([piece])) for piece in read_all(ground.store(), place)]
    assert kept == [(3 * n, [b"%d-%d" % (n, i) for i in range(3)]) for n in range(len(kept))]
    assert told == [3 * number for number in range(len(told))]
    assert len(kept) - len(told) in (0, 1)


VERBS: dict[str, Callable[[Store, int], object]] = {
    "append": lambda store, place: append(store, place, numbered(0)),
    "poll": lambda store, place: store.progress.poll(
        store.catalog.group("orders", "billing"), place, ask(11, 5, messages=3)
    ),
}


def die(url: str, place: int, verb: str, point: str, pipe: Connection) -> None:
    """Run a verb, and die at that point of its last transaction."""
    store = opened(url)
    die_in(store.session.dialect, point)
    VERBS[verb](store, place)
    pipe.send("survived")


@pytest.mark.parametrize("point", POINTS)
def test_an_append_killed_inside_its_transaction(ground: Ground, place: int, point: str) -> None:
    with child(die, ground.url, place, "append", point) as (_, pipe):
        assert drained(pipe) == []
    store = ground.store()
    done = append(store, place, numbered(0), numbered(1))
    assert [d.base_offset for d in done] == [0, 3]
    assert [d.duplicate for d in done] == [point == "after commit", False]
    assert len(read_all(store, place)) == 2


@pytest.mark.parametrize("point", POINTS)
def test_a_poll_killed_inside_its_transaction_is_answered_when_it_is_repeated(
    ground: Ground, place: int, point: str
) -> None:
    """I6."""
    store = ground.store()
    append(store, place, batch(5))
    group = store.catalog.group("orders", "billing")
    store.progress.rewind(group, [place])
    with child(die, ground.url, place, "poll", point) as (_, pipe):
        assert drained(pipe) == []
    assert spans(store.progress.poll(group, place, ask(11, 5, messages=3))) == [(0, 2)]
    assert spans(store.progress.poll(group, place, ask(12, 5))) == [(3, 4)]
    assert store.progress.settle(group, place, 11, acks((0, 2))).lost == ()
    assert store.progress.committed(group.id, place) == 3


# ---- many at once -----------------------------------------------------------------------------------------


def open_new(urls: list[str], together: Any, pipe: Connection) -> None:
    for url in urls:
        together.wait(60)
        opened(url, make_tables=True).close()
    pipe.send("done")


@both
def test_many_processes_make_the_tables_at_once(kind: str, request: pytest.FixtureRequest) -> None:
    """One makes them, the others wait and find them made; whoever is first claims the progress."""
    server: Server = request.getfixturevalue(f"{kind}_server")
    names = [server.create_database() for _ in range(4)]
    together = CONTEXT.Barrier(WRITERS)
    with ExitStack() as stack:
        urls = [server.url(name) for name in names]
        pipes = [stack.enter_context(child(open_new, urls, together))[1] for _ in range(WRITERS)]
        assert [drained(pipe) for pipe in pipes] == [["done"]] * WRITERS
    for name in names:
        server.drop_database(name)


def compete(url: str, who: int, pipe: Connection) -> None:
    store = opened(url)
    pipe.send("ready")
    pipe.recv()
    with contextlib.suppress(postroom.TopicExists):
        store.catalog.create_topic("orders", TopicSettings(), 1)
    (place,) = partitions(store.catalog.topic("orders"))
    waits = []
    for number in range(BATCHES):
        begin = time.monotonic()
        append(store, place, batch(2, producer=who, sequence=2 * number, value=b"%d:%d" % (who, number)))
        waits.append(time.monotonic() - begin)
    pipe.send(waits)


def test_many_processes_write_one_partition(
    ground: Ground, record_property: Callable[[str, object], None]
) -> None:
    with ExitStack() as stack:
        pipes = [stack.enter_context(child(compete, ground.url, who))[1] for who in range(1, WRITERS + 1)]
        assert [received(pipe) for pipe in pipes] == ["ready"] * WRITERS
        for pipe in pipes:
            pipe.send("go")
        waits = [wait for pipe in pipes for wait in received(pipe, 60)]
    store = ground.store()
    (place,) = partitions(store.catalog.topic("orders"))
    found = values(read_all(store, place))
    assert len(found) == len(set(found)) == 2 * WRITERS * BATCHES
    for who in range(1, WRITERS + 1):
        mine = [value for value in found if value.startswith(b"%d:" % who)]
        assert mine == [b"%d:%d-%d" % (who, n, i) for n in range(BATCHES) for i in range(2)]
    figures = f"longest wait {max(waits):.3f} s of {len(waits)} appends by {WRITERS} processes"
    record_property(f"fairness on {ground.kind}", figures)
    print(f"{ground.kind}: {figures}")
    assert max(waits) < 5


# ---- what two processes might both do (I12, I13) ----------------------------------------------------------


def delay(url: str, name: str, pipe: Connection) -> None:
    """Send delayed messages, and take part in moving them."""

    async def main() -> None:
        async with postroom.connect(url) as mq:
            pipe.send("ready")
            await asyncio.to_thread(pipe.recv)
            messages = [postroom.Message(f"{name}:{n}".encode(), delay=0.05 * (n % 10)) for n in range(60)]
            await mq.send_many("later", messages)
            pipe.send("sent")
            await asyncio.to_thread(pipe.recv)

    asyncio.run(main())


@pytest.mark.slow("waits for the lease of a mover that was killed")
async def test_delayed_messages_of_two_processes_come_once(ground: Ground) -> None:
    """I12: both have a mover; one of them is killed while it moves."""
    async with postroom.connect(ground.url) as mq:
        await mq.create_topic("later", partitions=2)
    with ExitStack() as stack:
        crew = [stack.enter_context(child(delay, ground.url, name)) for name in "ab"]
        assert {await asyncio.to_thread(received, pipe) for _, pipe in crew} == {"ready"}
        for _, pipe in crew:
            pipe.send("go")
        assert {await asyncio.to_thread(received, pipe) for _, pipe in crew} == {"sent"}
        crew[0][0].kill()
        async with postroom.connect(ground.url) as mq, mq.consumer("later", "billing") as consumer:
            found: list[bytes] = []
            while len(found) < 120:
                messages = await consumer.poll(wait=20)
                assert messages, f"only {len(found)} of 120 came"
                found += [message.value for message in messages]
                await consumer.ack(messages)
            stored = [message.value async for message in mq.read("later")]
    wanted = {f"{name}:{n}".encode() for name in "ab" for n in range(60)}
    assert Counter(stored) == Counter(found) == dict.fromkeys(wanted, 1)


def send_ids(url: str, together: Any, pipe: Connection) -> None:
    async def main() -> None:
        async with postroom.connect(url) as mq:
            fresh = []
            for number in range(25):
                await asyncio.to_thread(together.wait, 60)
                receipt = await mq.send("unique", b"x", key="k", id=f"o-{number}")
                fresh.append((receipt.offset, receipt.duplicate))
        pipe.send(fresh)

    asyncio.run(main())


async def test_an_id_sent_by_two_processes_at_once_is_stored_once(ground: Ground) -> None:
    """I13, R32: whoever comes second is told where the first one's is."""
    async with postroom.connect(ground.url) as mq:
        await mq.create_topic("unique", partitions=1, dedup_window="10m")
        together = CONTEXT.Barrier(2)
        with ExitStack() as stack:
            pipes = [stack.enter_context(child(send_ids, ground.url, together))[1] for _ in range(2)]
            one, two = [await asyncio.to_thread(received, pipe, 60) for pipe in pipes]
        assert [offset for offset, _ in one] == [offset for offset, _ in two] == list(range(25))
        assert [left + right for (_, left), (_, right) in zip(one, two, strict=True)] == [1] * 25
        assert [m.id async for m in mq.read("unique")] == [f"o-{number}" for number in range(25)]
