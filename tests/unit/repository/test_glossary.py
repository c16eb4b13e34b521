"""One word has one meaning: the words that once had several, counted where names are given.

Counts the names that code *defines* (classes, functions, parameters, variables), not those it uses:
`str.join` is Python's word. A name counts if one of its parts is the word: `look_at`, `_Lookup` does not.
ARCHITECTURE.md has the glossary; `MEANS` says the same for the words that are held here, and what to write
instead.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[3]
SOURCE = ROOT / "src" / "postroom"

MEANS = {
    "lane": "a group's slow lane (R42); an area of the store is an `area`",
    "place": "nothing: write position, offset, partition, address, table … for what it is",
    "gate": "the gate before a successor (I10); a limit is a `limit`, `rate` or `backlog`",
    "turn": "the next of a fair queue; a right to poll is a `permit`, a file's is a `lock`",
    "look": "nothing: write poll, read, check, or `SingleFlight`",
    "held": "nothing: write in flight, leased, assigned or buffered",
    "waiting": "nothing: write delayed, queued or pending",
    "join": "a member joins a group",
    "publish": "what a job has staged goes into the log; a producer sends",
}

FORMS = {
    "lane": {"lane", "lanes"},
    "place": {"place", "places", "placed"},
    "gate": {"gate", "gates"},
    "turn": {"turn", "turns"},
    "look": {"look", "looks", "looked", "looking"},
    "held": {"held"},
    "waiting": {"waiting"},
    "join": {"join", "joins", "joined", "joining"},
    "publish": {"publish", "publishes", "published", "publishing", "publisher"},
}

CLASSES = {"Place", "Waiting", "Row", "Known"}
"""Names for a class that say nothing; a leading underscore does not help."""

PUBLIC_CLASSES = {
    "client/forward/outbox_table.py": {"Waiting"},
    "client/guards/rules.py": {"Waiting"},
}

# Where a word has its one meaning: files, and rooms whose every file has it so.
OWN: dict[str, tuple[str, ...]] = {
    "lane": (
        "broker/",
        "cli/framework/options.py",
        "client/admin.py",
        "client/consumer/",
        "endpoint/",
        "http/",
        "model/",
        "store/contract/",
        "store/sql/slow_lanes.py",
        "testing/store_contract/served.py",
        "wire/",
    ),
    "gate": ("errors.py", "store/sql/progress/", "testing/store_contract/progress/gate.py"),
    "turn": ("model/policy/fair_queue.py",),
    "join": (
        "broker/deliver/",
        "kafka/groups/",
        "model/kafka_group.py",
        "store/contract/",
        "store/sharded/",
        "testing/store_contract/",
    ),
    "publish": (
        "broker/moves/",
        "client/producer/staging.py",
        "endpoint/",
        "model/moves/",
        "store/sql/staging.py",
        "testing/store_contract/",
        "wire/",
    ),
}
# Names with the word's one meaning, wherever they are.
OWN_NAMES = {
    "lane": {"slow_lane", "slow_lanes", "lanes"},  # `store.lanes` and `mq.lanes` are the slow lanes
    "join": {"joined_at"},
}

# Names that still have the word in another sense, by room. A count may only fall; at 0 the line goes.
ALLOWED: dict[str, dict[str, int]] = {
    "lane": {"client": 3},
    "place": {
        "broker": 98,
        "cli": 13,
        "client": 29,
        "endpoint": 2,
        "http": 9,
        "model": 22,
        "spark": 60,
        "store": 51,
        "tasks": 4,
        "testing": 373,
        "tls": 1,
        "wire": 1,
    },
    "gate": {"broker": 15},
    "turn": {
        "broker": 13,
        "client": 15,
        "http": 1,
        "model": 3,
        "spark": 9,
        "store": 3,
        "testing": 17,
        "wire": 2,
    },
    "look": {
        "broker": 41,
        "cli": 9,
        "client": 42,
        "clock": 4,
        "config": 1,
        "http": 6,
        "model": 3,
        "spark": 6,
        "store": 34,
        "tasks": 1,
        "testing": 6,
        "wire": 10,
    },
    "held": {
        "broker": 13,
        "cli": 3,
        "client": 21,
        "endpoint": 4,
        "http": 11,
        "model": 8,
        "store": 16,
        "testing": 7,
        "wire": 30,
    },
    "waiting": {
        "broker": 14,
        "cli": 8,
        "client": 47,
        "http": 4,
        "model": 5,
        "spark": 6,
        "store": 3,
        "tasks": 3,
        "testing": 3,
        "wire": 8,
    },
    "join": {"client": 10, "http": 1, "integrations": 1, "model": 6, "spark": 1, "store": 5, "wire": 2},
    "publish": {"broker": 3, "integrations": 1, "spark": 2},  # of integrations, a name of kombu's
}


class Use(NamedTuple):
    word: str
    room: str
    name: str
    where: str


def parts_of(name: str) -> set[str]:
    """The words of a name: `_NextLook_s` has next, look and s."""
    return {part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def defined(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Names that are given in it, with their lines; a test's name is a sentence and does not count."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if name.startswith("test_"):
                continue
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, node.lineno
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
                yield name, node.lineno
            case ast.Attribute(attr=name, ctx=ast.Store()):
                yield name, node.lineno


def uses(source: Path) -> Iterator[Use]:
    """Names with one of the words in a sense that is not the word's own."""
    for path in sorted(source.rglob("*.py")):
        file = path.relative_to(source).as_posix()
        room = file.partition("/")[0].removesuffix(".py")
        for name, line in defined(ast.parse(path.read_text(encoding="utf-8"))):
            for word in words_in(name):
                if not file.startswith(OWN.get(word, ())) and name.strip("_").lower() not in OWN_NAMES.get(
                    word, ()
                ):
                    yield Use(word, room, name, f"{file}:{line}")


def words_in(name: str) -> list[str]:
    parts = parts_of(name)
    return [word for word, forms in FORMS.items() if parts & forms]


def too_many(found: list[Use], allowed: dict[str, dict[str, int]]) -> list[str]:
    by_room = defaultdict(list)
    for use in found:
        by_room[use.word, use.room].append(use)
    return [
        f"{room} gives {len(names)} names with {word!r}, {allowed.get(word, {}).get(room, 0)} are allowed; "
        f"it means {MEANS[word]}: " + ", ".join(f"{use.name} ({use.where})" for use in names)
        for (word, room), names in sorted(by_room.items())
        if len(names) > allowed.get(word, {}).get(room, 0)
    ]


def nameless_classes(source: Path) -> list[str]:
    return [
        f"{path.relative_to(source).as_posix()}:{node.lineno} class {node.name}: say what it is"
        for path in sorted(source.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
        and node.name.strip("_") in CLASSES - PUBLIC_CLASSES.get(path.relative_to(source).as_posix(), set())
    ]


def counted(found: list[Use]) -> dict[str, dict[str, int]]:
    """The table as it would be now, to store as `ALLOWED`.

    `python -m tests.unit.repository.test_glossary` prints it.
    """
    table: dict[str, Counter[str]] = defaultdict(Counter)
    for use in found:
        table[use.word][use.room] += 1
    return {word: dict(sorted(table[word].items())) for word in FORMS if word in table}


# --- Postroom keeps them -----------------------------------------------------------------------------


@pytest.mark.slow("make check runs it")
def test_no_word_gets_a_second_meaning() -> None:
    assert too_many(list(uses(SOURCE)), ALLOWED) == []


@pytest.mark.slow("make check runs it")
def test_a_class_says_what_it_is() -> None:
    assert nameless_classes(SOURCE) == []


def test_the_glossary_has_every_word_that_is_held_here() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    rows = {cell.strip() for cell in re.findall(r"^\|([^|]+)\|", page, re.MULTILINE)}
    assert {word for word in MEANS if word not in rows} == set()


# --- the rules themselves notice ---------------------------------------------------------------------


@pytest.fixture
def source(tmp_path: Path) -> Path:
    poll = "def look_at(place):\n    lookup = ','.join(x)\n    self._turn = 1\n    slow_lane = 2"
    files = {
        "broker/poll.py": poll,
        "broker/rows.py": "class _Row: ...\nclass Rows: ...\nclass T:\n    def test_the_place(self): ...",
        "model/policy/slow_lane.py": "lane = 1",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def test_a_name_with_such_a_word_is_found(source: Path) -> None:
    found = list(uses(source))
    names = [(use.word, use.name, use.where) for use in found]
    assert sorted(names) == [
        ("look", "look_at", "broker/poll.py:1"),
        ("place", "place", "broker/poll.py:1"),
        ("turn", "_turn", "broker/poll.py:3"),
    ]
    table = counted(found)
    assert table == {"place": {"broker": 1}, "turn": {"broker": 1}, "look": {"broker": 1}}
    assert too_many(found, table) == []
    (sentence,) = too_many(found, {**table, "look": {"store": 1}})
    assert sentence.startswith("broker gives 1 names with 'look', 0 are allowed")


def test_a_class_that_says_nothing_is_found(source: Path) -> None:
    assert nameless_classes(source) == ["broker/rows.py:1 class _Row: say what it is"]


if __name__ == "__main__":
    for word, rooms in counted(list(uses(SOURCE))).items():
        print(f'    "{word}": {rooms},'.replace("'", '"'))
