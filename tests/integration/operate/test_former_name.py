"""What was written before the project was called Postroom is refused, and left as it is.

Nothing was released then, so there is no upgrade. That name is not spelt here: any other prefix will do, for
that is how such tables are told.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import postroom
import postroom.sync
from postroom.address import parse
from postroom.client.forward import spool_file
from postroom.client.forward.spool_file import SpoolFile
from postroom.store import open_session, open_sqlite
from postroom.store.dialects.sqlite import SqliteDialect
from postroom.store.sql import schema
from postroom.store.sql.schema import MIGRATIONS, former_prefix, script, statements
from postroom.store.sql.session import Area
from tests.contract.cli_runner import Cli
from tests.ready import Ground, both
from tests.servers.server import Server

FORMER = "formerly"
SENTENCE = "a queue from before this project was called Postroom (tables formerly_schema, formerly_partitions"
FILE_CURE = "Name another file, or move this one away together with the files beside it"
SERVER_CURE = "Name another database, or drop those tables"
NAMES = re.findall(r"CREATE TABLE postroom_(\w+)", "\n".join(statements(1, Area.LOG, (Area.LOG,))))


def files(path: Path) -> list[Path]:
    return [path, *(path.with_name(f"{path.name}.{area}") for area in ("progress", "volatile"))]


def tables(file: Path) -> set[str]:
    with closing(sqlite3.connect(file)) as connection:
        return {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


def former_queue(path: Path) -> None:
    """A queue of today, with every table under another name."""
    open_sqlite(path).close()
    for file in files(path):
        rename(file)


def rename(file: Path) -> None:
    with closing(sqlite3.connect(file)) as connection:
        for name in tables(file):
            if name.startswith("postroom_"):
                connection.execute(f"ALTER TABLE {name} RENAME TO {name.replace('postroom', FORMER)}")


# ---- SQLite ----


async def test_a_file_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "orders.db"
    former_queue(path)
    before = [tables(file) for file in files(path)]
    for _ in range(2):
        with pytest.raises(postroom.SchemaMismatch) as told:
            await postroom.connect(f"sqlite:///{path}")
        assert SENTENCE in str(told.value) and FILE_CURE in str(told.value)
        assert not told.value.retriable
    assert [tables(file) for file in files(path)] == before


@pytest.mark.parametrize("left", ["progress", "volatile"])
async def test_a_file_beside_the_queue_is_enough(tmp_path: Path, left: str) -> None:
    """The log's file was moved away, the others were forgotten."""
    path = tmp_path / "orders.db"
    former_queue(path)
    for file in files(path):
        if not file.name.endswith(left):
            file.unlink()
    with pytest.raises(postroom.SchemaMismatch, match="before this project was called Postroom"):
        await postroom.connect(f"sqlite:///{path}")
    assert tables(path) == set()


def test_the_oldest_version_is_known_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "orders.db"
    with monkeypatch.context() as patch:
        patch.setattr(schema, "VERSION", 1)
        patch.setattr(SqliteDialect, "areas", (Area.LOG, Area.PROGRESS))
        with closing(open_session(parse(f"sqlite:///{path}"))) as session:
            schema.migrate(session)
    for file in files(path)[:2]:
        rename(file)
    with pytest.raises(postroom.SchemaMismatch, match="before this project was called Postroom"):
        open_sqlite(path)


async def test_a_shard_is_refused(tmp_path: Path) -> None:
    former_queue(tmp_path / "b.db")
    with pytest.raises(postroom.SchemaMismatch, match="before this project was called Postroom"):
        await postroom.connect(
            f"sqlite:///{tmp_path / 'a.db'}", shards={"b": f"sqlite:///{tmp_path / 'b.db'}"}
        )
    assert "postroom_schema" not in tables(tmp_path / "b.db")


@pytest.mark.parametrize(
    "words",
    [
        ("topic", "list"),
        ("topic", "create", "orders"),
        ("send", "orders", "hello"),
        ("migrate",),
        ("migrate", "--check"),
        ("migrate", "--sql"),
    ],
)
def test_every_command_says_so(tmp_path: Path, words: tuple[str, ...]) -> None:
    cli = Cli(tmp_path)
    former_queue(tmp_path / "queue.db")
    answer = cli(*words, "--json")
    assert answer.code == 1 and answer.error["error"] == "schema_mismatch"
    assert SENTENCE in answer.error["message"] and FILE_CURE in answer.error["message"]
    assert "postroom_schema" not in tables(tmp_path / "queue.db")


def test_doctor_says_so_of_each_file(tmp_path: Path) -> None:
    former_queue(tmp_path / "queue.db")
    answer = Cli(tmp_path)("doctor", "--json")
    said = {check["check"]: check for check in answer.json["checks"]}
    assert answer.code == 1
    for area in ("log", "progress", "volatile"):
        assert said[f"schema ({area})"]["state"] == "fail"
        assert SENTENCE in said[f"schema ({area})"]["message"]


def test_nothing_is_looked_for_once_there_is_a_schema(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a queue of ours beside the old tables is opened: whoever made it has seen them."""
    path = tmp_path / "orders.db"
    former_queue(path)
    for file in files(path):
        file.rename(file.with_name(f"old-{file.name}"))
    open_sqlite(path).close()
    for file in files(path):
        with closing(sqlite3.connect(file)) as connection:
            for name in tables(file.with_name(f"old-{file.name}")) - tables(file):
                connection.execute(f"CREATE TABLE {name} (x)")

    def looked(*_: object) -> list[str]:
        raise AssertionError("the tables were listed")

    monkeypatch.setattr(SqliteDialect, "tables", looked)
    open_sqlite(path).close()


# ---- what is another program's ----


@pytest.mark.parametrize("missing", NAMES)
def test_all_of_the_names_are_needed(missing: str) -> None:
    others = {f"shop_{name}" for name in ("schema", *NAMES, "orders")}
    assert former_prefix(others, NAMES) == "shop"
    assert former_prefix(others - {f"shop_{missing}"}, NAMES) is None
    assert former_prefix(others - {"shop_schema"}, NAMES) is None


def test_tables_of_several_programs_are_not_put_together() -> None:
    some, rest = NAMES[::2], NAMES[1::2]
    there = {"schema", *(f"shop_{n}" for n in ("schema", *some)), *(f"cafe_{n}" for n in ("schema", *rest))}
    assert former_prefix(there, NAMES) is None
    assert former_prefix({f"postroom_{name}" for name in ("schema", *NAMES)}, NAMES) is None


def test_the_names_looked_for_are_many() -> None:
    assert {"partitions", "progress", "topics", "deliveries"} <= set(NAMES) and len(NAMES) > 12
    assert min(MIGRATIONS) == 1


# ---- servers ----


@pytest.fixture
def empty(kind: str, request: pytest.FixtureRequest) -> Iterator[Ground]:
    server: Server = request.getfixturevalue(f"{kind}_server")
    ground = Ground(server, server.create_database())
    yield ground
    ground.close()
    server.drop_database(ground.name)


def server_tables(ground: Ground) -> set[str]:
    with closing(open_session(parse(ground.url))) as session, session.read(Area.LOG) as tx:
        return set(session.dialect.tables(tx))


def make_former(ground: Ground, *, but: str = "") -> None:
    with closing(open_session(parse(ground.url))) as session:
        made = [statement.replace("postroom_", f"{FORMER}_") for statement in script(session)]
    for statement in made:
        ground.rows(statement)
    if but:
        ground.rows(f"DROP TABLE {FORMER}_{but}")


@both
def test_a_database_is_refused_and_left_as_it_is(empty: Ground, tmp_path: Path) -> None:
    make_former(empty)
    before = server_tables(empty)
    assert f"{FORMER}_topics" in before
    for migrate in (True, False):
        with pytest.raises(postroom.SchemaMismatch) as told:
            postroom.sync.connect(empty.url, migrate=migrate)
        assert SENTENCE in str(told.value) and SERVER_CURE in str(told.value)
    cli = Cli(tmp_path, empty.url)
    for words in (("migrate",), ("migrate", "--check"), ("migrate", "--sql"), ("topic", "list")):
        answer = cli(*words, "--json")
        assert answer.code == 1 and SENTENCE in answer.error["message"]
    (schema_check,) = [c for c in cli("doctor", "--json").json["checks"] if c["check"] == "schema"]
    assert schema_check["state"] == "fail" and SENTENCE in schema_check["message"]
    assert server_tables(empty) == before


@both
async def test_an_application_with_tables_of_its_own_is_not_refused(empty: Ground) -> None:
    """Even one that has nearly all of the names."""
    make_former(empty, but="duties")
    async with postroom.connect(empty.url, migrate=True) as mq:
        await mq.create_topic("orders")
    assert {f"{FORMER}_topics", "postroom_topics"} <= server_tables(empty)


# ---- the spool ----


@pytest.fixture
def former_spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "orders.spool"
    text = spool_file._SCHEMA.replace(str(spool_file._APPLICATION), str(0x50535031))
    assert text != spool_file._SCHEMA
    with monkeypatch.context() as patch:
        patch.setattr(spool_file, "_SCHEMA", text)
        patch.setattr(spool_file, "_APPLICATION", 0x50535031)
        SpoolFile(path).close()
    return path


async def test_a_spool_is_refused_and_left_as_it_is(former_spool: Path) -> None:
    before = former_spool.read_bytes()
    for _ in range(2):
        with pytest.raises(postroom.SchemaMismatch) as told:
            await postroom.Spool(former_spool, "postroom://127.0.0.1:1").open()
        assert "a spool from before this project was called Postroom" in str(told.value)
        assert "Name another file, and forward what still waits in this one" in str(told.value)
    assert former_spool.read_bytes() == before


def test_the_command_says_so_of_a_spool(former_spool: Path) -> None:
    answer = Cli(former_spool.parent)("spool", str(former_spool), "--json")
    assert answer.code == 1 and answer.error["error"] == "schema_mismatch"
    assert "a spool from before this project was called Postroom" in answer.error["message"]
