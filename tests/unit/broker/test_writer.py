"""The writer: what is stored in the event loop, and what in the thread."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from postroom.backoff import Pauses
from postroom.broker.deliver.readable import TailCache
from postroom.broker.publish.writer import Writer
from postroom.config import Limits
from postroom.errors import ClosedError, PostroomError
from postroom.model.policy.settings import TopicSettings
from postroom.store import SqlStore, open_sqlite
from postroom.store.contract import Append, Appended
from postroom.testing.store_contract.harness import batch
from tests.tuned import tuned

EASY = tuned(broker={"commit_quick_s": 60.0})  # however busy the machine is


class Watched:
    """A log that notes in which thread, and how many at once, batches were stored."""

    def __init__(self, store: SqlStore) -> None:
        self.log = store.log
        self.stored: list[tuple[bool, int]] = []  # in the event loop's thread, batches
        self.loop = threading.get_ident()
        self.slow_s = 0.0
        self.fails: Exception | None = None

    def append(self, appends: Sequence[Append]) -> list[Appended | PostroomError]:
        self.stored.append((threading.get_ident() == self.loop, len(appends)))
        return self.log.append(appends)

    def append_at_once(self, appends: Sequence[Append]) -> list[Appended | PostroomError] | None:
        assert threading.get_ident() == self.loop
        if self.fails is not None:
            raise self.fails
        time.sleep(self.slow_s)
        found = self.log.append_at_once(appends)
        if found is not None:
            self.stored.append((True, len(appends)))
        return found


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[Watched]:
    store = open_sqlite(tmp_path / "store.db")
    store.catalog.create_topic("orders", TopicSettings(), 1)
    yield Watched(store)
    store.close()


def writer_of(watched: Watched, limits: Limits = EASY) -> Writer:
    return Writer(watched, TailCache(10_000_000), limits, lambda ends: None, at_once=True)  # type: ignore[arg-type]


def sent(number: int, producer: int = 7, size: int = 10) -> Append:
    return Append(1, batch(producer=producer, sequence=number, value=b"x" * size))


async def test_one_after_the_other_is_stored_in_the_loop(watched: Watched) -> None:
    writer = writer_of(watched)
    found = [await writer.append(sent(number)) for number in range(5)]
    await writer.close()
    assert [one.base_offset for one in found] == [0, 1, 2, 3, 4]
    assert watched.stored == [(False, 1)] + [(True, 1)] * 4  # of the first, nothing is known


async def test_what_comes_together_is_one_commit(watched: Watched) -> None:
    writer = writer_of(watched)
    await writer.append(sent(0))
    found = await asyncio.gather(*(writer.append(sent(number)) for number in range(1, 6)))
    assert [one.base_offset for one in found] == [1, 2, 3, 4, 5]
    assert watched.stored[1:] == [(True, 5)]
    await asyncio.gather(*(writer.append(sent(number, size=20_000)) for number in range(6, 10)))
    assert {here for here, _ in watched.stored[2:]} == {False}  # that is much
    await writer.close()


async def test_however_many_there_are_the_loop_stores_them(watched: Watched) -> None:
    """All but the first, of whose producer nothing is known: checkpoints are made elsewhere."""
    writer = writer_of(watched)
    for number in range(250):
        await writer.append(sent(number))
    await writer.close()
    assert [at for at, (here, _) in enumerate(watched.stored) if not here] == [0]


async def test_a_slow_disk_holds_up_the_loop_seldom(watched: Watched) -> None:
    limits = tuned(broker={"commit_quick_s": 0.005, "commit_pauses": Pauses(3600.0, 3600.0)})
    writer = writer_of(watched, limits)
    watched.slow_s = 0.02
    for number in range(10):
        await writer.append(sent(number))
    await writer.close()
    assert sum(here for here, _ in watched.stored) <= 1


async def test_one_late_commit_is_forgiven(watched: Watched) -> None:
    limits = tuned(broker={"commit_quick_s": 0.3, "commit_pauses": Pauses(3600.0, 3600.0)})
    writer = writer_of(watched, limits)
    await writer.append(sent(0))
    for number, slow_s in enumerate((0.4, 0.0, 0.4, 0.4, 0.0, 0.0), 1):
        watched.slow_s = slow_s
        await writer.append(sent(number))
    await writer.close()
    assert [here for here, _ in watched.stored] == [False, True, True, True, True, False, False]


async def test_senders_have_their_answers_before_polls_are_woken(watched: Watched) -> None:
    order: list[str] = []
    loop, woken = asyncio.get_running_loop(), asyncio.Event()

    def answer(result: object) -> None:
        loop.call_soon(order.append, "answered")

    def wake(ends: dict[int, int]) -> None:
        order.append("woken")
        woken.set()

    writer = Writer(watched, TailCache(10_000_000), EASY, wake, at_once=True)  # type: ignore[arg-type]
    for number in range(2):  # by the thread, and in the loop
        writer.queue(sent(number), (1, 7), answer)
        await asyncio.wait_for(woken.wait(), 60)
        woken.clear()
    assert order == ["answered", "woken"] * 2 and [here for here, _ in watched.stored] == [False, True]
    await writer.close()


async def test_what_fails_in_the_loop_is_told_by_the_thread(watched: Watched) -> None:
    writer = writer_of(watched)
    await writer.append(sent(0))
    watched.fails = RuntimeError("a fault")
    assert (await writer.append(sent(1))).base_offset == 1
    assert watched.stored == [(False, 1), (False, 1)]
    await writer.close()


async def test_what_has_just_come_is_stored_when_it_is_closed(watched: Watched) -> None:
    writer = writer_of(watched)
    await writer.append(sent(0))
    last = writer.append(sent(1))
    await writer.close()
    assert (await last).base_offset == 1
    with pytest.raises(ClosedError):
        writer.append(sent(2))
    assert len(watched.log.read(1, 0, max_messages=10, max_bytes=10_000)) == 2


async def test_what_clients_send_is_queued_a_turn_later_and_is_one_commit(watched: Watched) -> None:
    writer, told = writer_of(watched), asyncio.Queue[Appended | PostroomError]()
    await writer.append(sent(0))
    for number in (1, 2, 3):
        writer.queue_soon(sent(number), (1, 7), told.put_nowait)
    assert not writer.queued_bytes
    await asyncio.sleep(0)
    assert writer.queued_bytes
    async with asyncio.timeout(20):
        found = [await told.get() for _ in range(3)]
    assert [one.base_offset for one in found if isinstance(one, Appended)] == [1, 2, 3]
    assert watched.stored[1:] == [(True, 3)]
    await writer.close()


async def test_what_clients_have_just_sent_is_told_that_it_is_closed(watched: Watched) -> None:
    writer, told = writer_of(watched), asyncio.Queue[Appended | PostroomError]()
    closing = asyncio.create_task(writer.close())
    await asyncio.sleep(0)
    writer.queue_soon(sent(0), (1, 7), told.put_nowait)
    async with asyncio.timeout(20):
        assert isinstance(await told.get(), ClosedError)
    await closing


# ---- alone: stored in the call of its sender ----


async def lone_writer(watched: Watched, told: list[dict[int, int]] | None = None) -> Writer:
    """One to which batches have come one at a time for a while."""
    tell = (lambda ends: None) if told is None else told.append
    writer = Writer(watched, TailCache(10_000_000), EASY, tell, at_once=True)  # type: ignore[arg-type]
    assert not writer.alone()
    for number in range(10):
        await writer.append(sent(number))
    assert writer.alone()
    return writer


async def test_what_comes_alone_is_stored_in_the_call(watched: Watched) -> None:
    told: list[dict[int, int]] = []
    writer = await lone_writer(watched, told)
    await asyncio.sleep(0)
    told.clear()
    for number in (10, 11):
        assert writer.alone()
        stored = writer.store_alone(1, sent(number).batch)
        assert stored is not None and stored.base_offset == number and not told
        await asyncio.sleep(0)
        assert not told  # before those who poll are woken, the sender has its answer
        writer.yielded()
        assert told.pop() == {1: number + 1}
    assert writer._tail.reaches(1, 12)
    await writer.close()


async def test_a_second_one_in_the_same_turn_is_one_commit_with_the_others(watched: Watched) -> None:
    writer = await lone_writer(watched)
    assert writer.store_alone(1, sent(10).batch) is not None
    assert not writer.alone()
    writer.yielded()
    assert not writer.alone()  # not before batches come alone for a while again
    await asyncio.gather(*(writer.append(sent(number)) for number in range(11, 20)))
    assert watched.stored[-2:] == [(True, 1), (True, 9)]
    assert not writer.alone()
    await writer.close()


async def test_nothing_is_stored_in_the_call_ahead_of_what_is_queued(watched: Watched) -> None:
    writer = await lone_writer(watched)
    queued = writer.append(sent(10))
    assert not writer.alone()
    assert (await queued).base_offset == 10
    await writer.close()
    assert not writer.alone()


async def test_what_was_tried_alone_in_vain_is_queued_and_stored_once(watched: Watched) -> None:
    writer = await lone_writer(watched)
    store = watched.append_at_once

    def lost(appends: Sequence[Append]) -> list[Appended | PostroomError] | None:
        store(appends)
        raise RuntimeError("it is stored, and nobody knows")

    watched.append_at_once = lost  # type: ignore[method-assign]
    assert writer.store_alone(1, sent(10).batch) is None
    assert not writer.alone()
    watched.append_at_once = store  # type: ignore[method-assign]
    found = await writer.append(sent(10))
    assert (found.base_offset, found.duplicate) == (10, True)
    assert watched.log.bounds([1])[1].end == 11
    await writer.close()


async def test_a_large_one_or_one_on_a_slow_disk_is_not_stored_in_the_call(watched: Watched) -> None:
    writer = await lone_writer(watched)
    assert writer.store_alone(1, sent(10, size=70_000).batch) is None
    for number in range(10, 20):
        await writer.append(sent(number))
    assert writer.alone()
    writer._slow_until = time.perf_counter() + 3600
    assert writer.store_alone(1, sent(20).batch) is None
    await writer.close()


# ---- to a server: sent in the event loop, which is told of the answer ----


class Sent:
    """A batch that a server has got, and answers when it is told to."""

    def __init__(self, server: Server, append: Append) -> None:
        self._server, self._append = server, append
        self._socket, self._theirs = socket.socketpair()
        self.patience_s, self.unsent, self.abandoned = server.patience_s, False, False
        self.fileno = self._socket.fileno
        self._stored = True

    def answer(self, stored: bool = True) -> None:
        self._stored = stored
        self._theirs.send(b"x")

    def answered(self) -> bool:
        return bool(self._socket.recv(1))

    def result(self) -> Appended | None:
        self.end()
        found = self._server.watched.log.append([self._append])[0] if self._stored else None
        assert not isinstance(found, PostroomError), found
        return found

    def abandon(self) -> None:
        self.abandoned = True
        self.end()

    def end(self) -> None:
        self._server.under_way = None
        self._socket.close()
        self._theirs.close()


class Server:
    """A log on a server, where nothing may be begun before the last is answered."""

    def __init__(self, watched: Watched, *, by_itself: bool = True) -> None:
        self.watched, self._by_itself = watched, by_itself
        self.sent: list[Sent] = []
        self.under_way: Sent | None = None
        self.overtaken = 0
        self.patience_s = 60.0

    def send(self, append: Append) -> Sent | None:
        self.overtaken += self.under_way is not None
        self.under_way = Sent(self, append)
        self.sent.append(self.under_way)
        if self._by_itself:
            self.under_way.answer()
        return self.under_way

    def append(self, appends: Sequence[Append]) -> list[Appended | PostroomError]:
        self.overtaken += self.under_way is not None
        return self.watched.append(appends)


def to_server(server: Server) -> Writer:
    return Writer(server, TailCache(10_000_000), EASY, lambda ends: None)  # type: ignore[arg-type]


async def under_way(server: Server) -> Sent:
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert server.under_way is not None
    return server.under_way


async def test_one_after_the_other_is_sent_in_the_loop(watched: Watched) -> None:
    server = Server(watched)
    writer = to_server(server)
    found = [await writer.append(sent(number)) for number in range(5)]
    await writer.close()
    assert [one.base_offset for one in found] == [0, 1, 2, 3, 4]
    assert len(server.sent) == 5 and not watched.stored


async def test_what_comes_alone_is_sent_as_it_is_queued(watched: Watched) -> None:
    server = Server(watched)
    writer = to_server(server)
    for number in range(10):
        await writer.append(sent(number))
    assert writer.alone() and writer.store_alone(1, sent(10).batch) is None
    server._by_itself = False
    found = [writer.append(sent(10))]
    assert len(server.sent) == 11 and not writer.alone()  # without a turn of the loop
    found += [writer.append(sent(number)) for number in (11, 12)]
    assert len(server.sent) == 11  # these wait for the answer, and are one commit
    (await under_way(server)).answer()
    assert [(await one).base_offset for one in found] == [10, 11, 12]
    assert watched.stored == [(False, 2)] and server.overtaken == 0
    server._by_itself = True
    await writer.append(sent(13))
    assert not writer.alone()
    await writer.close()


async def test_who_comes_while_another_is_sent_does_not_come_alone(watched: Watched) -> None:
    server = Server(watched, by_itself=False)
    writer, found = to_server(server), list[asyncio.Future[Appended]]()
    for number in range(12):
        found.append(writer.append(sent(number)))
        await asyncio.sleep(0)
        if number:
            (await under_way(server)).answer()
            await found[number - 1]
    (await under_way(server)).answer()
    assert (await found[-1]).base_offset == 11
    assert len(server.sent) == 12 and not writer.alone()
    await writer.close()


async def test_what_comes_meanwhile_is_one_commit_behind_it(watched: Watched) -> None:
    server = Server(watched, by_itself=False)
    writer = to_server(server)
    first = writer.append(sent(0))
    on_its_way = await under_way(server)
    others = [writer.append(sent(number)) for number in range(1, 4)]
    await asyncio.sleep(0.01)
    assert not watched.stored
    on_its_way.answer()
    assert [(await one).base_offset for one in (first, *others)] == [0, 1, 2, 3]
    assert watched.stored == [(False, 3)]
    await writer.close()


async def test_what_an_answer_brings_on_never_overtakes_what_is_sent(watched: Watched) -> None:
    """A sender that is told goes on at once, and another one in the same turn of the loop."""
    server = Server(watched)
    writer, loop = to_server(server), asyncio.get_running_loop()
    numbers, told = iter(range(60)), list[Appended | PostroomError]()
    done = asyncio.Event()

    def queue() -> None:
        if (number := next(numbers, None)) is not None:
            writer.queue(sent(number), (1, 7), go_on)

    def go_on(result: Appended | PostroomError) -> None:
        told.append(result)
        if len(told) == 60:
            done.set()
        loop.call_soon(queue)
        queue()

    queue()
    await asyncio.wait_for(done.wait(), 30)
    await writer.close()
    assert not server.overtaken
    assert sorted(one.base_offset for one in told if isinstance(one, Appended)) == list(range(60))


@pytest.mark.parametrize("how", ["the answer is no", "there is none"])
async def test_what_is_not_known_to_be_stored_is_told_by_the_thread(watched: Watched, how: str) -> None:
    server = Server(watched, by_itself=False)
    server.patience_s = 60.0 if how == "the answer is no" else 0.05
    writer = to_server(server)
    first = writer.append(sent(0))
    on_its_way = await under_way(server)
    second = writer.append(sent(1))
    if how == "the answer is no":
        on_its_way.answer(stored=False)
    assert [(await one).base_offset for one in (first, second)] == [0, 1]
    assert watched.stored == [(False, 2)]
    assert on_its_way.abandoned == (how == "there is none")
    await writer.close()


async def test_the_timer_of_one_does_not_end_the_next(watched: Watched) -> None:
    server = Server(watched, by_itself=False)
    writer = to_server(server)
    first = writer.append(sent(0))
    (await under_way(server)).answer()
    await first
    second = writer.append(sent(1))
    on_its_way = await under_way(server)
    writer._give_up()  # as if the first had taken as long as it may
    assert not on_its_way.abandoned
    on_its_way.patience_s = 0
    writer._give_up()
    assert on_its_way.abandoned
    assert (await second).base_offset == 1
    await writer.close()


async def test_it_is_closed_when_the_answer_has_come(watched: Watched) -> None:
    server = Server(watched, by_itself=False)
    writer = to_server(server)
    first = writer.append(sent(0))
    on_its_way = await under_way(server)
    second = writer.append(sent(1))
    closing = asyncio.create_task(writer.close())
    await asyncio.sleep(0.01)
    assert not closing.done()
    on_its_way.answer()
    await closing
    assert [(await one).base_offset for one in (first, second)] == [0, 1]
    with pytest.raises(ClosedError):
        writer.append(sent(2))
