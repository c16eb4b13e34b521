"""Files hold messages and hashes of tokens: nobody but their owner reads them, whatever the umask."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import postroom
from postroom.files import write_private
from postroom.store import open_sqlite
from postroom.store.dialects.sqlite import SqliteDialect
from postroom.store.sql.session import Area
from tests.contract.cli_runner import Cli

pytestmark = pytest.mark.skipif(os.name != "posix", reason="files have no modes here")


@pytest.fixture(autouse=True, params=[0o022, 0o000], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, str]:
    return {file.name: oct(file.stat().st_mode & 0o777) for file in folder.iterdir()}


async def test_a_queue_is_its_owner_s(tmp_path: Path) -> None:
    folder = tmp_path / "queue"
    folder.mkdir()
    async with postroom.connect(f"sqlite:///{folder / 'q.db'}") as mq:
        await mq.create_topic("orders")
        await mq.create_topic("fast", storage="volatile")
        await mq.send("orders", b"secret")
        await mq.send("fast", b"secret")
        async with mq.consumer("orders", group="g") as consumer:
            async for message in consumer:
                await message.ack()
                break
        found = modes(folder)
    assert {"q.db", "q.db-wal", "q.db-shm", "q.db.progress", "q.db.progress-wal", "q.db.lock"} <= set(found)
    assert set(found.values()) == {"0o600"}, found


async def test_a_spool_is_its_owner_s(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    folder.mkdir()
    async with postroom.connect("memory://") as mq:
        await mq.create_topic("orders")
        async with mq.producer("orders", spool=folder / "o.spool") as producer:
            await producer.send(b"secret")
            found = modes(folder)
    assert {"o.spool", "o.spool-wal", "o.spool.lock"} <= set(found)
    assert set(found.values()) == {"0o600"}, found


def test_what_the_operator_opened_to_others_stays_so(tmp_path: Path) -> None:
    """Processes of several users share a file: what is made beside it later is theirs, too."""
    path = tmp_path / "q.db"
    open_sqlite(path).close()
    for file in tmp_path.iterdir():
        file.chmod(0o660)
    SqliteDialect(path, postroom.clock.SystemClock()).discard(Area.VOLATILE)
    (tmp_path / "q.db.lock").unlink()
    with closing(open_sqlite(path)) as store:
        store.access.principals()
        store.brokers.enter("b", "here", "", 0, 1000)
        assert set(modes(tmp_path).values()) == {"0o660"}, modes(tmp_path)


def test_an_empty_file_of_another_mode_is_left_so(tmp_path: Path) -> None:
    path = tmp_path / "q.db"
    path.touch()
    path.chmod(0o640)
    open_sqlite(path).close()
    assert modes(tmp_path)["q.db"] == "0o640"


def test_a_text_for_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_private(path, "longer than what comes next")
    assert oct(path.stat().st_mode & 0o777) == "0o600"
    path.chmod(0o644)
    write_private(path, "short")
    assert path.read_text() == "short" and oct(path.stat().st_mode & 0o777) == "0o644"


def test_doctor_says_who_else_can_read_a_queue(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir(mode=0o755)
    cli = Cli(folder)
    cli.ok("topic", "create", "orders")

    def found() -> list[dict[str, str]]:
        return [c for c in cli.ok("--json", "doctor").json["checks"] if c["check"] == "privacy"]

    assert [check["state"] for check in found()] == ["ok"]
    (folder / "queue.db").chmod(0o644)
    (check,) = found()
    assert check["state"] == "warn" and "chmod o-rwx" in check["advice"] and "queue.db" in check["message"]
    folder.chmod(0o700)
    assert [check["state"] for check in found()] == ["ok"]  # nobody else comes that far
