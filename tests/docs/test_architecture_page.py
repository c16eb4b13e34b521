"""ARCHITECTURE.md is true: every file it names is there, and a message really takes the three walks.

The walks are traced: every call in every thread, for a send, a poll and an ack on a SQLite file. A file that
a walk names must be on the way; a file that is always on the way must be named, in the walk or among those
that are everywhere. When a way changes, the failure says what to change on the page.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.walks import Way

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "postroom"
PAGE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
MOST_LINES = 160

WALKS = ("send", "poll", "ack")

_FILE = re.compile(r"`([a-z_]+(?:/[a-z_]+)*\.py)`")
_FOLDER = re.compile(r"`([a-z_]+(?:/[a-z_]+)*/)`")


# --- the page ------------------------------------------------------------------------------------------


def section(title: str) -> str:
    """The text below a heading, up to the next."""
    found = re.search(rf"^#+ {title}$(.*?)(?=^#|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None, f"ARCHITECTURE.md has no heading {title!r}"
    return found[1]


def named(title: str) -> set[str]:
    return set(_FILE.findall(section(title)))


def test_the_page_is_short_enough_to_read() -> None:
    assert len(PAGE.splitlines()) <= MOST_LINES


def test_every_file_that_the_page_names_is_there() -> None:
    named = _FILE.findall(PAGE)
    assert [name for name in named if not ((SOURCE / name).is_file() or (ROOT / name).is_file())] == []


def test_every_folder_that_the_page_names_is_there() -> None:
    assert [name for name in _FOLDER.findall(PAGE) if not (SOURCE / name).is_dir()] == []


def test_every_room_is_on_the_page() -> None:
    rooms = {path.parent.relative_to(SOURCE).as_posix() for path in SOURCE.glob("*/__init__.py")}
    assert {room for room in rooms if f"`{room}/`" not in PAGE} == set()


# --- the walks -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ways() -> dict[str, list[Way]]:
    line = [sys.executable, "-m", "tests.docs.walks", "--json"]
    done = subprocess.run(line, cwd=ROOT, stdout=subprocess.PIPE, timeout=100, check=True)
    found: dict[str, list[Way]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("walk", WALKS)
def test_what_a_walk_names_is_on_the_way(ways: dict[str, list[Way]], walk: str) -> None:
    passed = set[str]().union(*ways[walk])
    if walk == "poll":  # a consumer polls ahead: a part may be done before it is asked
        passed = passed.union(*ways["meanwhile"])
    strays = sorted(named(f"Walk: {walk}") - passed)
    assert strays == [], f"the walk {walk!r} in ARCHITECTURE.md names files that it does not pass: {strays}"


@pytest.mark.parametrize("walk", WALKS)
def test_what_is_on_the_way_is_named(ways: dict[str, list[Way]], walk: str) -> None:
    always = set.intersection(*(set(way) for way in ways[walk]))
    known = named(f"Walk: {walk}") | named("Everywhere")
    if walk == "ack":  # the consumer's next poll is under way
        known |= named("Walk: poll")
    missing = sorted(always - known)
    said = [f"{file} ({ways[walk][0][file]})" for file in missing]
    assert missing == [], f"the walk {walk!r} in ARCHITECTURE.md leaves out: {', '.join(said)}"
