"""A process that dies between any two steps of a guard: one effect per message, in order per entity (R33).

The steps are every statement of the guard, the handler's own work, the commit and the ack. A child dies after
its first step, the next one after its second, and so on until one comes to the end; after each of them
another process goes on with what was not acked, as a queue would.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from postroom import RetryLater, guards
from postroom.client import databases
from postroom.client.message import Received
from tests.integration.guards.guarding import SCOPE, Place, database_of, delivered
from tests.integration.processes.children import child, received

PATIENCE_S = 240
_SERIAL = {
    "sqlite": "INTEGER PRIMARY KEY AUTOINCREMENT",
    "postgres": "SERIAL PRIMARY KEY",
    "mysql": "INTEGER AUTO_INCREMENT PRIMARY KEY",
}
_TABLES = ("journal", "postroom_guards_seen", "postroom_guards_entities", "postroom_guards_waiting")
RULES = {"created": None, "paid": "created", "shipped": "paid"}


@pytest.fixture(scope="module", params=["sqlite", "postgres", "mysql"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Place:
    found = database_of(request, tmp_path_factory)
    connection = found.connect()
    cursor = connection.cursor()
    cursor.execute(
        f"CREATE TABLE journal (place {_SERIAL[found.kind]}, entity VARCHAR(20), what VARCHAR(20))"
    )
    connection.commit()
    connection.close()
    return found


# ---- what is delivered, how it is guarded, and what is to become of it ----


@dataclass(frozen=True)
class Scene:
    guard: Callable[[Any, Received], Any]
    comes: Sequence[dict[str, Any]]
    effects: dict[str, list[str]] = field(default_factory=dict)  # by entity, in order


def _guard(name: str, **how: Any) -> Callable[[Any, Received], Any]:
    return lambda connection, message: getattr(guards, name)(connection, message, scope=SCOPE, **how)


SCENES = {
    "once": Scene(
        _guard("once"),
        [{"id": id, "what": id} for id in ("1", "2", "1", "3")],
        {"42": ["1", "2", "3"]},
    ),
    "newest": Scene(
        _guard("newest"),
        [{"version": version, "what": version} for version in (1, 3, 2, 4)],
        {"42": ["1", "3", "4"]},
    ),
    "in_sequence": Scene(
        _guard("in_sequence"),
        [
            {"key": key, "version": version, "what": version}
            for key, version in (("a", 2), ("b", 1), ("a", 3), ("a", 1), ("b", 1))
        ],
        {"a": ["1", "2", "3"], "b": ["1"]},
    ),
    "transitions": Scene(
        _guard("transitions", rules=RULES),
        [{"event": event, "what": event} for event in ("created", "shipped", "paid")],
        {"42": ["created", "paid", "shipped"]},
    ),
}


# ---- a process that handles what is not acked ----


class Steps:
    """Dies after the step of that number; 0: never."""

    def __init__(self, last: int) -> None:
        self.last, self.count = last, 0

    def done(self) -> None:
        self.count += 1
        if self.count == self.last:
            os.kill(os.getpid(), signal.SIGKILL)


def handle(connection: Any, scene: Scene, acked: Path, last: int = 0) -> None:
    """`acked` stands for the queue: it has a byte for each message that was acked."""
    steps = Steps(last)
    with _counting(steps):
        waiting = [n for n in range(len(scene.comes)) if n not in acked.read_bytes()]
        attempts = dict.fromkeys(waiting, 1)
        while waiting:
            number = waiting.pop(0)
            message = delivered(number, attempt=attempts[number], **scene.comes[number])
            try:
                _handle(connection, scene, message, steps)
            except RetryLater:
                connection.rollback()
                attempts[number] += 1
                waiting.append(number)
                continue
            with acked.open("ab") as file:
                file.write(bytes([number]))
            steps.done()


def _handle(connection: Any, scene: Scene, message: Received, steps: Steps) -> None:
    with scene.guard(connection, message) as decided:
        for one in decided if isinstance(decided, guards.Ready) else [message] * decided:
            what, entity = one.headers["what"].decode(), (one.key or b"").decode()
            connection.cursor().execute(f"INSERT INTO journal (entity, what) VALUES ('{entity}', '{what}')")
            steps.done()
    connection.commit()
    steps.done()


class _counting:
    """Every statement of a guard is a step."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def __enter__(self) -> None:
        kind: Any = databases._Driver
        self._before = kind.run, kind.rows
        for name in ("run", "rows"):
            setattr(kind, name, _then(getattr(kind, name), self._steps))

    def __exit__(self, *_: object) -> None:
        kind: Any = databases._Driver
        kind.run, kind.rows = self._before


def _then(call: Callable[..., Any], steps: Steps) -> Callable[..., Any]:
    def counted(*args: Any) -> Any:
        found = call(*args)
        steps.done()
        return found

    return counted


# ---- one death after the other ----


def all_deaths(place: Place, name: str, acked: Path, pipe: Any) -> None:
    """In a process without threads, so that each child is a fork of it."""
    scene, connection = SCENES[name], connected(place)
    deaths = 0
    while _dies(place, scene, acked, connection, deaths + 1):
        deaths += 1
        handle(connection, scene, acked)
        pipe.send((deaths, _effects(connection)))
    pipe.send((deaths, None))


def connected(place: Place) -> Any:
    """Nothing is flushed: the process dies here, not the machine."""
    connection = place.connect()
    if place.kind != "mysql":
        off = "PRAGMA synchronous = OFF" if place.kind == "sqlite" else "SET synchronous_commit = off"
        connection.cursor().execute(off)
        connection.commit()
    return connection


def _dies(place: Place, scene: Scene, acked: Path, connection: Any, last: int) -> bool:
    for table in _TABLES:
        connection.cursor().execute(f"DELETE FROM {table}")
    connection.commit()
    acked.write_bytes(b"")
    pid = os.fork()
    if not pid:
        try:
            handle(connected(place), scene, acked, last)
        finally:
            os._exit(0)  # and the connection of the process it is a fork of stays as it was
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def _effects(connection: Any) -> dict[str, list[str]]:
    cursor = connection.cursor()
    cursor.execute("SELECT entity, what FROM journal ORDER BY place")
    found: dict[str, list[str]] = {}
    for entity, what in cursor.fetchall():
        found.setdefault(entity, []).append(what)
    connection.commit()
    return found


def _reports(pipe: Any) -> Iterator[tuple[int, dict[str, list[str]] | None]]:
    while (report := received(pipe, PATIENCE_S))[1] is not None:
        yield report


@pytest.mark.timeout(PATIENCE_S)
@pytest.mark.parametrize("name", SCENES)
def test_a_process_may_die_between_any_two_steps(place: Place, name: str, tmp_path: Path) -> None:
    scene = SCENES[name]
    deaths = 0
    with child(all_deaths, place, name, tmp_path / "acked") as (_, pipe):
        for deaths, found in _reports(pipe):
            assert found == scene.effects, f"after step {deaths}"
    assert deaths >= 3 * len(scene.comes)  # a statement, the commit and the ack of each
