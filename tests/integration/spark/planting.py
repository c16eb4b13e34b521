"""A topic with faults that were planted in it, for the audit: what it has to find, and nothing else.

Every key counts its messages from 0 on. Faults are spread over keys by chance, at most one in a key, so that
each has one effect.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

import postroom
from postroom.spark.jobs.audit import AuditOptions
from postroom.spark.jobs.fields import Journal

__all__ = ["Planted", "fill", "options", "plant", "reported"]

One: TypeAlias = tuple[int, int]
"""A message: key and number."""

Found: TypeAlias = set[tuple[str, str, str]]
"""Stage, kind, and what is told: an id, or a key and a range of numbers."""

_SOME = 20_000


@dataclass
class Planted:
    keys: int
    numbers: int  # of each key
    lost: set[One] = field(default_factory=set)
    repeated: set[One] = field(default_factory=set)
    swapped: set[One] = field(default_factory=set)  # it and the next one of its key
    handled_lost: set[One] = field(default_factory=set)
    handled_repeated: set[One] = field(default_factory=set)
    handled_swapped: set[One] = field(default_factory=set)
    runs: set[tuple[int, int, int]] = field(default_factory=set)  # lost: key, first and last number
    ghosts: tuple[str, ...] = ("ghost-1", "ghost-2", "ghost-3")  # handled, and never stored

    def sent(self) -> Iterator[One]:
        return ((key, number) for number in range(self.numbers) for key in range(self.keys))

    def stored(self) -> Iterator[One]:
        for key, number in _swapping(self.sent(), self.swapped):
            if (key, number) not in self.lost:
                yield key, number
            if (key, number) in self.repeated:
                yield key, number

    def handled(self) -> Iterator[str]:
        first = (one for one in _swapping(self.sent(), self.swapped | self.handled_swapped))
        for one in first:
            if one not in self.lost and one not in self.handled_lost:
                yield _id(one)
            if one in self.handled_repeated:
                yield _id(one)
        yield from self.ghosts

    def found(self) -> Found:
        """What an audit by numbers and by ids has to say."""
        by_id = {
            ("stored", "lost"): self.lost,
            ("stored", "repeated"): self.repeated,
            ("stored", "out of order"): self.swapped,
            ("handled", "lost"): self.handled_lost,
            ("handled", "repeated"): self.handled_repeated,
            ("handled", "out of order"): self.handled_swapped,
        }
        found = {(*what, _id(one)) for what, some in by_id.items() for one in some}
        found |= {("handled", "unknown", ghost) for ghost in self.ghosts}
        found |= {("stored", "lost", f"k{key} {first}-{last}") for key, first, last in self.runs}
        found |= {("stored", "repeated", f"k{key} {number}") for key, number in self.repeated}
        found |= {("stored", "out of order", f"k{key} {number}") for key, number in self.swapped}
        return found


def plant(keys: int, numbers: int, *, each: int, seed: int) -> Planted:
    """`each`: how many of each fault; of what is lost they are runs of up to five."""
    chance = random.Random(seed)
    chosen = iter(chance.sample(range(keys), 6 * each))
    planted = Planted(keys, numbers)

    def places() -> set[One]:  # not at the ends of a key, where numbers alone do not tell
        return {(next(chosen), chance.randrange(1, numbers - 7)) for _ in range(each)}

    for key, number in places():
        last = number + chance.randrange(5)
        planted.runs.add((key, number, last))
        planted.lost |= {(key, n) for n in range(number, last + 1)}
    planted.repeated, planted.swapped = places(), places()
    planted.handled_lost, planted.handled_repeated, planted.handled_swapped = places(), places(), places()
    return planted


def fill(mq: Any, topic: str, planted: Planted, folder: Path) -> int:
    """Send what is stored, and write both journals; how many messages that is."""
    count, some = 0, list[postroom.Message]()
    for key, number in planted.stored():
        value = b'{"id":"k%d-%d","seq":%d}' % (key, number, number)
        some.append(postroom.Message(value, key=b"k%d" % key))
        if len(some) == _SOME:
            mq.send_many(topic, some, timeout=120)
            count, some = count + len(some), []
    if some:
        mq.send_many(topic, some, timeout=120)
    _journal(folder / "sent.parquet", map(_id, planted.sent()))
    _journal(folder / "handled.parquet", planted.handled())
    return count + len(some)


def options(url: str, topic: str, folder: Path) -> AuditOptions:
    return AuditOptions(
        queue={"url": url},
        topic=topic,
        number="json:seq",
        id="json:id",
        sent=Journal(str(folder / "sent.parquet"), at="at"),
        handled=(Journal(str(folder / "handled.parquet"), at="at"),),
        report=str(folder / "report.jsonl"),
    )


def reported(folder: Path) -> Found:
    """Each line of the report is about another fault."""
    found: list[tuple[str, str, str]] = []
    for text in (folder / "report.jsonl").read_text().splitlines():
        line = json.loads(text)
        what = line.get("id")
        if what is None:
            numbers = f"{line['number']}-{line['last_number']}" if line["kind"] == "lost" else line["number"]
            what = f"{line['key']} {numbers}"
        found.append((line["stage"], line["kind"], what))
    assert len(set(found)) == len(found), "something is told twice"
    return set(found)


def _id(one: One) -> str:
    return f"k{one[0]}-{one[1]}"


def _swapping(ordered: Iterator[One], swapped: set[One]) -> Iterator[One]:
    """A key's number and the one after it change places."""
    after = {(key, number + 1): (key, number) for key, number in swapped}
    for key, number in ordered:
        if (key, number) in swapped:
            yield key, number + 1
        else:
            yield after.get((key, number), (key, number))


def _journal(path: Path, ids: Iterator[str]) -> None:
    column = pa.array(ids, pa.string())
    pq.write_table(pa.table({"id": column, "at": pa.array(range(len(column)), pa.int64())}), path)
