"""A full disk is emptied by Postroom itself: what is purged makes room, and sends go on."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

import postroom
from postroom.broker.duties import DropLogs, Retention
from postroom.broker.topology.catalog_cache import CatalogCache
from postroom.broker.topology.topics import Admin
from postroom.config import DEFAULTS
from postroom.errors import StoreFull
from postroom.model.messages.batch import BatchBuilder
from postroom.model.policy.settings import TopicSettings
from postroom.store import open_sqlite
from postroom.store.contract import Append, Store
from postroom.store.dialects.write_ahead import BALLAST
from tests.integration.store.test_faults import check_sound, fill, mounted
from tests.integration.wire.wire_raw import broker_of
from tests.tuned import Tune

KIB = 1024
SECONDS = 60


@pytest.fixture(autouse=True)
def looking_always(tune: Tune) -> None:
    """The disk is full sooner than it is looked at."""
    tune(store={"ballast_check_s": 0.0})


class Queue:
    def __init__(self, store: Store) -> None:
        self.store = store
        self.admin = Admin(store, CatalogCache(store))
        self.places: dict[str, int] = {}
        for topic in ("old", "new"):
            store.catalog.create_topic(topic, TopicSettings(), 1)
            (piece,) = store.catalog.topic(topic).route.partitions
            self.places[topic] = piece.partition_id

    def send(self, topic: str) -> bool:
        """False: the disk is full."""
        builder = BatchBuilder()
        builder.append(0, None, os.urandom(500 * KIB), [])
        try:
            self.store.log.append([Append(self.places[topic], builder.build())])
        except StoreFull:
            return False
        return True

    def fill(self, topic: str) -> int:
        count = 0
        while self.send(topic):
            count += 1
        return count

    def until_it_takes(self, topic: str, meanwhile: Callable[[], None]) -> None:
        """As background work does every ten seconds."""
        deadline = time.monotonic() + SECONDS
        while not self.send(topic):
            assert time.monotonic() < deadline, "it was not emptied"
            meanwhile()
            time.sleep(0.05)

    @contextmanager
    def sending(self, topic: str) -> Iterator[None]:
        """Somebody who sends, and goes on when it is refused."""
        stop = threading.Event()

        def send() -> None:
            while not stop.is_set():
                self.send(topic)

        sender = threading.Thread(target=send)
        sender.start()
        try:
            yield
        finally:
            stop.set()
            sender.join()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "128m") as disk:
        yield disk


@pytest.mark.slow("fills a disk again and again")
def test_a_full_disk_is_emptied_by_a_purge_again_and_again(disk: Path) -> None:
    """While somebody sends all the time: what the purge needs is not for senders."""
    path = disk / "q.db"
    with closing(open_sqlite(path)) as store:
        queue = Queue(store)
        stored = queue.fill("old")
        assert stored > 100 and (disk / "q.db.reserve").stat().st_size == BALLAST
        assert (disk / "q.db.reserve").stat().st_mode & 0o777 == 0o600
        fill(disk, "others")  # not even a page is left
        with queue.sending("new"):
            assert queue.admin.purge("old") == stored
        retention = Retention(store, DEFAULTS)
        queue.until_it_takes("new", retention.run_once)
        more = queue.fill("new")
        assert more > 100  # in the room that was made, though the disk has none
        assert queue.admin.purge("new") > 100
        queue.until_it_takes("new", retention.run_once)
        for _ in range(50):
            assert queue.send("new")
        subprocess.run(["mount", "-o", "remount,size=256m", str(disk)], check=True)
    check_sound(path, queue.places["new"])


def test_a_full_disk_is_emptied_by_deleting_a_topic(disk: Path) -> None:
    with closing(open_sqlite(disk / "q.db")) as store:
        queue = Queue(store)
        queue.fill("old")
        fill(disk, "others")
        queue.admin.delete_topic("old")
        queue.until_it_takes("new", DropLogs(store, DEFAULTS).run_once)


def test_a_process_that_finds_the_disk_being_emptied_refuses_sends_and_goes_on_later(disk: Path) -> None:
    """The one that emptied it may have been killed."""
    with closing(open_sqlite(disk / "q.db")) as store, closing(open_sqlite(disk / "q.db")) as other:
        queue = Queue(store)
        queue.fill("old")
        os.truncate(disk / "q.db.reserve", 0)
        queue.store = other
        assert not queue.send("new")  # there is room for it, but it is kept
        queue.admin.purge("old")
        queue.until_it_takes("new", Retention(other, DEFAULTS).run_once)


async def test_retention_runs_without_its_lease_on_a_full_disk(tmp_path: Path) -> None:
    """Its lease is written, too; what it does may be done by several at once."""
    async with postroom.connect(f"sqlite:///{tmp_path / 'q.db'}") as mq:
        broker = broker_of(mq)
        ran: list[str] = []

        def full(*args: object) -> bool:
            raise StoreFull("no space left")

        class Noted(Retention):
            def run_once(self) -> None:
                ran.append(self.name)

        class Other:
            name, every_s = "other", 1.0

            def run_once(self) -> None:
                ran.append(self.name)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(broker.store.duties, "acquire", full)
            broker.duties.run_once(Noted(broker.store, DEFAULTS))
            broker.duties.run_once(Other())
        assert ran == ["retention"]


def test_a_small_queue_has_no_ballast(tmp_path: Path) -> None:
    with closing(open_sqlite(tmp_path / "q.db")) as store:
        assert Queue(store).send("new")
        assert not (tmp_path / "q.db.reserve").exists()
