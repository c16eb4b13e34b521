"""ARCHITECTURE.md is true: every file it names is there, and a message really takes the three walks.

The walks are traced: every call in every thread, for a send, a poll and an ack on a SQLite file. A file that
a walk names must be on the way; a file that is always on the way must be named, in the walk or among those
that are everywhere. When a way changes, the failure says what to change on the page.
"""

from __future__ import annotations

import asyncio
import re
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

import postroom

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "postroom"
PAGE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
MOST_LINES = 160

WALKS = ("send", "poll", "ack")
ROUNDS = 3  # what is on the way by chance is not there each time

_FILE = re.compile(r"`([a-z_]+(?:/[a-z_]+)*\.py)`")
_FOLDER = re.compile(r"`([a-z_]+(?:/[a-z_]+)*/)`")

Way = dict[str, str]
"""Files that were passed, below the package, each with the first function that was called there."""


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


class Tracer:
    """Notes every file of the package in which a function is called, in any thread."""

    def __init__(self) -> None:
        self.way: Way = {}

    def note(self, frame: FrameType, event: str, arg: object) -> None:
        if event == "call":
            file = frame.f_code.co_filename
            if file.startswith(_BELOW):
                self.way.setdefault(file.removeprefix(_BELOW), frame.f_code.co_qualname)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Threads that begin inside are traced to their end."""
        before = sys.getprofile()
        threading.setprofile(self.note)
        sys.setprofile(self.note)
        try:
            yield
        finally:
            sys.setprofile(before)
            threading.setprofile(before)  # type: ignore[arg-type]

    def taken(self) -> Way:
        """What was passed since it was asked before."""
        way, self.way = self.way, {}
        return way


_BELOW = f"{SOURCE}/"


async def trace(url: str) -> dict[str, list[Way]]:
    """The files of each walk, once for each round; "meanwhile" is a send to a consumer that polls already."""
    tracer, found = Tracer(), defaultdict[str, list[Way]](list)
    with tracer.at_work():
        async with postroom.connect(url) as mq:
            await mq.create_topic("orders", partitions=1)
            await mq.send("orders", b"first", key=b"k")
            for _ in range(ROUNDS):
                tracer.taken()
                await mq.send("orders", b"x", key=b"k")
                found["send"].append(tracer.taken())
            async with mq.consumer("orders", group="billing", start="latest") as consumer:
                await consumer.poll(wait=0.05)
                for _ in range(ROUNDS):
                    await mq.send("orders", b"x", key=b"k")
                    found["meanwhile"].append(tracer.taken())
                    messages = await consumer.poll(wait=5)
                    found["poll"].append(tracer.taken())
                    await consumer.ack(messages)
                    found["ack"].append(tracer.taken())
    return found


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Way]]:
    return asyncio.run(trace(f"sqlite:///{tmp_path_factory.mktemp('walk')}/q.db"))


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


if __name__ == "__main__":  # python -m tests.docs.test_architecture_page: the ways as they are
    import tempfile

    for walk, ways_of in asyncio.run(trace(f"sqlite:///{tempfile.mkdtemp()}/q.db")).items():
        sure = set.intersection(*(set(way) for way in ways_of))
        print(f"{walk}: {len(sure)} files each time, {len(set[str]().union(*ways_of))} in all")
        for file, function in ways_of[0].items():
            print(f"    {'' if file in sure else '? '}{file}  {function}")
