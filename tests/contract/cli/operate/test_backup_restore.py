"""`postroom backup` and `postroom restore`: whole and checked, or nothing at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import sys
from collections import namedtuple
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path

import pytest

from postroom.address import parse
from postroom.cli.operate import backup as commands
from postroom.store import copies, open_store
from postroom.store.sql.schema import VERSION
from tests.contract.cli_runner import SECONDS, Cli

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only there it can be seen who uses a file")


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """Topic orders with three messages; group billing has had the first."""
    cli = Cli(tmp_path)
    cli.ok("topic", "create", "orders", "-p", "1")
    cli.ok("send", "orders", stdin="1\n2\n3\n")
    assert cli.ok("consume", "orders", "-g", "billing", "--create", "-n", "1").out == "1\n"
    return cli


@pytest.fixture
def copy(cli: Cli) -> Path:
    folder = cli.folder / "monday"
    cli.ok("backup", str(folder))
    return folder


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def remove_queue(folder: Path, name: str = "queue.db") -> None:
    for file in folder.glob(f"{name}*"):
        file.unlink()


def incarnation(url: str) -> str:
    with closing(open_store(parse(url))) as store:
        return store.catalog.incarnation()


def run_sql(file: Path, *statements: str) -> None:
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


def spoil(file: Path) -> None:
    """As a disk does that forgets: a stretch in the middle is zero."""
    size = file.stat().st_size
    with file.open("rb+") as opened:
        opened.seek(size // 4)
        opened.write(bytes(size // 2))


# ---- a backup ----


def test_a_queue_comes_back_with_its_groups_and_says_that_it_was_restored(cli: Cli) -> None:
    target, before = cli.folder / "monday", incarnation(cli.url)
    said = cli.ok("backup", str(target)).out
    assert said.startswith(f"backed up {cli.url} to {target}: 1 topic, 3 messages, ")
    assert said.endswith(f", schema version {VERSION}, checked\n") and said.count("\n") == 1
    assert names(target) == {"queue.db", "queue.db.progress"}
    cli.ok("send", "orders", "lost")
    remove_queue(cli.folder)
    answer = cli.ok("restore", str(target))
    assert "1 topic, 3 messages" in answer.out and "it has a new incarnation" in answer.out
    assert answer.err == "", "there are no tokens to warn of"
    assert names(cli.folder) == {"monday", "queue.db", "queue.db.progress"}
    assert incarnation(cli.url) != before
    assert cli.read_all("orders", "billing") == ["2", "3"]


def test_scripts_get_the_same_as_json(cli: Cli) -> None:
    target = cli.folder / "monday"
    made = cli.ok("backup", str(target), "--json").json
    size = sum(file.stat().st_size for file in target.iterdir())
    assert made == {
        "url": cli.url, "target": str(target), "topics": 1, "messages": 3, "bytes": size, "version": VERSION,
    }  # fmt: skip
    other = Cli(cli.folder, f"sqlite:///{cli.folder}/other.db")
    put = other.ok("restore", str(target), "--json").json
    assert (put["url"], put["source"], put["messages"]) == (other.url, str(target), 3)
    assert put["incarnation"] == incarnation(other.url) != incarnation(cli.url)


@pytest.mark.skipif(sys.platform == "win32", reason="no modes")
def test_only_the_owner_can_read_a_backup_and_what_is_restored(cli: Cli, copy: Path) -> None:
    remove_queue(cli.folder)
    cli.ok("restore", str(copy))
    files = [*copy.iterdir(), cli.folder / "queue.db", cli.folder / "queue.db.progress"]
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600} and copy.stat().st_mode & 0o777 == 0o700


def test_nothing_is_overwritten(cli: Cli, copy: Path) -> None:
    before = (copy / "queue.db").read_bytes()
    answer = cli("backup", str(copy))
    assert answer.code == 2 and "name a new folder" in answer.err
    assert (copy / "queue.db").read_bytes() == before
    (cli.folder / "tuesday.partial").mkdir()
    answer = cli("backup", str(cli.folder / "tuesday"))
    assert answer.code == 2 and "or was cut off; if none is, remove it" in answer.err
    assert (cli.folder / "tuesday.partial").exists() and not (cli.folder / "tuesday").exists()
    answer = cli("backup", str(cli.folder / "no" / "tuesday"))
    assert answer.code == 2 and "make it first" in answer.err


def test_a_queue_that_is_damaged_gives_no_backup(cli: Cli) -> None:
    spoil(cli.folder / "queue.db.progress")
    before = names(cli.folder)
    answer = cli("backup", str(cli.folder / "monday"), "--json")
    assert (answer.code, answer.error["error"]) == (1, "store_corrupt")
    assert "keep the backups you have" in answer.error["message"]
    assert names(cli.folder) <= before | {"queue.db-wal", "queue.db-shm"}


def test_a_full_disk_is_not_filled(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 1000, 1000))
    answer = cli("backup", str(cli.folder / "monday"), "--json")
    assert (answer.code, answer.error["error"]) == (1, "store_full") and "1000 B are free" in answer.err
    assert not list(cli.folder.glob("monday*"))


def test_a_file_of_somebody_else_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "shop.db"
    run_sql(file, "CREATE TABLE orders (id)")
    before = file.read_bytes()
    answer = Cli(tmp_path, f"sqlite:///{file}")("backup", str(tmp_path / "monday"))
    assert answer.code == 2 and "is not a queue of Postroom" in answer.err
    assert names(tmp_path) == {"shop.db"} and file.read_bytes() == before


def test_a_queue_without_its_progress_is_refused(cli: Cli) -> None:
    remove_queue(cli.folder, "queue.db.progress")
    answer = cli("backup", str(cli.folder / "monday"))
    assert answer.code == 1 and "queue.db.progress is missing: put it back" in answer.err
    missing = Cli(cli.folder, f"sqlite:///{cli.folder}/no.db")("backup", str(cli.folder / "monday"))
    assert missing.code == 1 and "there is no queue" in missing.err
    assert not list(cli.folder.glob("monday*")) and not list(cli.folder.glob("no.db*"))


def test_a_backup_before_an_upgrade_does_not_change_the_tables(cli: Cli) -> None:
    for ending in ("", ".progress"):
        run_sql(cli.folder / f"queue.db{ending}", f"DELETE FROM postroom_schema WHERE version = {VERSION}")
    assert cli.ok("backup", str(cli.folder / "monday"), "--json").json["version"] == VERSION - 1
    assert copies.schema_version(cli.folder / "queue.db") == VERSION - 1
    assert copies.schema_version(cli.folder / "monday" / "queue.db") == VERSION - 1


def test_a_file_that_is_always_written_is_copied_as_it_was_at_one_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target, steps = tmp_path / "a.db", tmp_path / "b.db", list[int]()
    monkeypatch.setattr(copies, "_STEP_PAGES", 5)
    run_sql(source, "PRAGMA journal_mode=WAL", "CREATE TABLE t (value)")
    insert = "INSERT INTO t VALUES (randomblob(3000))"
    with closing(sqlite3.connect(source, isolation_level=None)) as writer:
        for _ in range(100):
            writer.execute(insert)

        def told(done: int, total: int) -> None:
            steps.append(done)
            assert len(steps) < 100, "it begins anew whenever somebody writes"
            writer.execute(insert)
            writer.execute("UPDATE t SET value = 'changed' WHERE rowid <= 100")

        copies.copy_database(source, target, told)
    assert len(steps) > 10 and steps == sorted(steps)
    copies.check_file(target)
    with closing(sqlite3.connect(target)) as copied:
        assert copied.execute("SELECT COUNT(*), SUM(value = 'changed') FROM t").fetchone() == (100, 0)


@pytest.mark.slow("starts programs")
@on_linux
def test_progress_is_shown_on_a_terminal(cli: Cli) -> None:
    screen, terminal = os.openpty()
    process = cli.start("backup", "monday", stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)
    seen = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while block := os.read(screen, 65536):
            seen += block
    os.close(screen)
    assert process.wait(SECONDS) == 0
    assert b"checking queue.db" in seen and b"backed up" in seen


# ---- a restore ----


@pytest.mark.parametrize("left", ["", "-wal", ".progress", ".progress-wal", ".volatile"])
def test_what_is_left_of_a_queue_is_in_the_way(cli: Cli, copy: Path, left: str) -> None:
    remove_queue(cli.folder)
    (cli.folder / f"queue.db{left}").write_bytes(b"left")
    answer = cli("restore", str(copy))
    assert (
        answer.code == 2
        and f"there is queue.db{left} in" in answer.err
        and "move all its files" in answer.err
    )
    assert names(cli.folder) == {"monday", f"queue.db{left}"}
    assert (cli.folder / f"queue.db{left}").read_bytes() == b"left"


@on_linux
@pytest.mark.parametrize("removed", [False, True])
def test_a_queue_that_somebody_still_uses_is_not_replaced(cli: Cli, copy: Path, removed: bool) -> None:
    """Also one whose files were removed: what that process confirms would be in no file."""
    before = names(cli.folder)
    with closing(open_store(parse(cli.url))):
        if removed:
            remove_queue(cli.folder)
        answer = cli("restore", str(copy), "--json")
    assert (answer.code, answer.error["error"]) == (1, "store_busy")
    assert "stop every process" in answer.error["message"]
    assert names(cli.folder) == ({"monday"} if removed else before)


@on_linux
def test_a_queue_in_use_is_no_backup(cli: Cli) -> None:
    other = Cli(cli.folder, f"sqlite:///{cli.folder}/other.db")
    with closing(open_store(parse(cli.url))):
        answer = other("restore", str(cli.folder))
    assert answer.code == 1 and "make one with `postroom backup`" in answer.err
    assert not list(cli.folder.glob("other.db*"))


@pytest.mark.parametrize("damaged", ["queue.db", "queue.db.progress"])
def test_a_damaged_backup_is_refused_and_nothing_is_left(cli: Cli, copy: Path, damaged: str) -> None:
    remove_queue(cli.folder)
    spoil(copy / damaged)
    answer = cli("restore", str(copy), "--json")
    assert (answer.code, answer.error["error"]) == (1, "store_corrupt")
    assert f"{damaged} is not a sound database" in answer.error["message"]
    assert "use another backup" in answer.error["message"] and names(cli.folder) == {"monday"}


def test_files_of_two_backups_are_refused(cli: Cli, copy: Path) -> None:
    cli.ok("send", "orders", "4")
    assert cli.read_all("orders", "billing") == ["2", "3", "4"]
    cli.ok("backup", str(cli.folder / "tuesday"))
    shutil.copy(cli.folder / "tuesday" / "queue.db.progress", copy)
    remove_queue(cli.folder)
    answer = cli("restore", str(copy))
    assert answer.code == 1 and "the log is older than its progress" in answer.err
    assert names(cli.folder) == {"monday", "tuesday"}


def test_a_backup_of_a_newer_version_is_refused(cli: Cli, copy: Path) -> None:
    remove_queue(cli.folder)
    run_sql(copy / "queue.db", "INSERT INTO postroom_schema (version, applied_at) VALUES (999, 0)")
    answer = cli("restore", str(copy), "--json")
    assert (answer.code, answer.error["error"]) == (1, "schema_mismatch") and names(cli.folder) == {"monday"}


def test_what_is_no_backup_is_refused(cli: Cli, copy: Path) -> None:
    remove_queue(cli.folder)
    assert "there is no folder" in cli("restore", str(cli.folder / "no")).err
    (copy / "queue.db.progress").rename(copy / "elsewhere")
    answer = cli("restore", str(copy))
    assert answer.code == 2 and "no log with its progress beside it" in answer.err
    assert names(cli.folder) == {"monday"}


def test_a_copy_by_hand_is_restored_with_its_write_ahead_log(cli: Cli) -> None:
    folder = cli.folder / "by-hand"
    folder.mkdir()
    with closing(sqlite3.connect(cli.folder / "queue.db")) as reader:
        reader.execute("SELECT 1 FROM sqlite_master").fetchone()  # so that the file stays
        cli.ok("send", "orders", "4")
        assert (cli.folder / "queue.db-wal").stat().st_size > 0
        for name in ("queue.db", "queue.db-wal", "queue.db.progress"):
            shutil.copy(cli.folder / name, folder)
    remove_queue(cli.folder)
    assert cli.ok("restore", str(folder), "--json").json["messages"] == 4
    assert cli.read_all("orders", "billing") == ["2", "3", "4"]


def test_tokens_that_come_back_are_spoken_of(cli: Cli) -> None:
    cli.ok("access", "add", "shop", "--allow", "send:orders")
    cli.ok("backup", str(cli.folder / "monday"))
    remove_queue(cli.folder)
    assert "are valid again: see `postroom access list`" in cli.ok("restore", str(cli.folder / "monday")).err


# ---- several shards, and servers ----


def test_all_shards_are_copied_all_progress_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cli, begun = Cli(tmp_path), list[str]()
    more = ("--shard", f"b=sqlite:///{tmp_path}/b.db")

    def begin(name: str) -> Callable[[int, int], None]:
        begun.append(name)
        return lambda done, total: None

    monkeypatch.setattr(commands, "_copying", lambda run: nullcontext(begin))
    cli.ok("topic", "create", "orders", "-p", "2", *more)
    cli.ok("send", "orders", *more, stdin="".join(f"{n}\n" for n in range(40)))
    target = str(tmp_path / "monday")
    alone = cli("backup", target)
    assert alone.code == 2 and "add --shard b=URL" in alone.err and not begun
    assert cli.ok("backup", target, *more, "--json").json["messages"] == 40
    files = ["queue.db.progress", "b.db.progress", "queue.db", "b.db"]
    assert begun[:4] == [f"copying {file}" for file in files]
    remove_queue(tmp_path)
    remove_queue(tmp_path, "b.db")
    assert "add --shard b=URL" in cli("restore", target).err and names(tmp_path) == {"monday"}
    assert cli.ok("restore", target, *more, "--json").json["messages"] == 40
    assert names(tmp_path) == {"monday", *files}
    assert len(cli.ok("read", "orders", *more).out.split()) == 40
    assert "was restored" in cli.ok("restored", *more).out


@pytest.mark.parametrize(
    ("url", "dumped", "put"),
    [
        (
            "postgresql+psycopg://me:secret@db:5433/queue",
            "pg_dump --format=custom --file=monday.dump postgresql://me@db:5433/queue",
            "pg_restore --no-owner --exit-on-error --dbname=postgresql://me@db:5433/queue monday",
        ),
        (
            "mysql://me:secret@db/queue",
            "mariadb-dump --single-transaction --host=db --port=3306 --user=me --password queue > monday.sql",
            "mariadb --host=db --port=3306 --user=me --password queue < monday",
        ),
    ],
)
def test_on_a_server_both_say_what_to_run(tmp_path: Path, url: str, dumped: str, put: str) -> None:
    cli = Cli(tmp_path, url)
    for words, line in ((("backup", "monday"), dumped), (("restore", "monday"), put)):
        answer = cli(*words)
        assert answer.code == 2 and line in answer.out.splitlines() and "# never: " in answer.out
        assert "run what is printed" in answer.err and "secret" not in answer.out + answer.err
        as_json = cli(*words, "--json")
        assert as_json.code == 2 and as_json.json["run"][0] == line and as_json.error["error"] == "usage"
    assert as_json.json["run"][1:] == ["postroom doctor", "postroom restored"]


@pytest.mark.parametrize("url", ["memory://", "postroom://127.0.0.1:1"])
def test_what_keeps_nothing_is_neither_backed_up_nor_restored(tmp_path: Path, url: str) -> None:
    for word in ("backup", "restore"):
        answer = Cli(tmp_path, url)(word, str(tmp_path / "monday"))
        assert answer.code == 2 and "with --url" in answer.err and not names(tmp_path)
