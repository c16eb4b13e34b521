"""Staged messages: what a job writes is invisible until it is decided, and then published once (I20).

A job is known by the id of its query; it writes batch after batch, numbered. The tasks of a batch stage
segments, each under a name of its own attempt. One decision says which segments a batch consists of; whoever
comes with the same batch again gets that decision back. What has been decided is moved into the logs as due
messages are (`model.schedule`): the same plan over the same rows gives the same batches (I12).

Rows may carry where they come from: a source partition and an offset in it. Then the query has marks, the
highest offset of each source partition that was ever decided. Writers leave out what lies at or below the
marks, so that a batch that comes back with another range brings only what is new. Without source offsets
that cannot be told, and is refused: by the number of rows, and by their content if the job says what that is.
Must never depend on anything but its arguments.

A query belongs to the principal that staged or decided it first, and is nobody else's (I23): its name is no
secret, and whoever could decide for it could publish nothing in its place. Jobs with the database itself have
no principal, and are inside: they may go on with any query, which stays whose it is, and what they begin is
not for principals.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from ...errors import InvalidSetting, PermissionDenied, StagingConflict
from ..messages.batch import Headers, batches_in, verify
from ..messages.sequence import next_sequence
from ..policy.bounds import MOST_SEGMENTS, Label, Position, Whole
from ..topology.names import HEADER_PREFIX
from .schedule import Planned

__all__ = [
    "DUTY",
    "NAME_CHARS",
    "Content",
    "Decision",
    "OpenMove",
    "Progress",
    "PublishedSpan",
    "Segment",
    "Span",
    "StagedQuery",
    "Wish",
    "advanced",
    "check_name",
    "differ",
    "joined",
    "marks_after",
    "of_messages",
    "owner_after",
    "revision_for",
    "split_batches",
    "summed",
]


# ---- the content of a job's batch in a few bytes, which tell whether it comes again with the same rows ----
# A row has a hash, and a batch the sum of them: so neither the order of the rows counts, nor how they are
# spread over tasks, and each task adds up its own. A sum begins with how its rows were hashed; others are
# not compared with it, and an empty one with none. It is there for mistakes, not against somebody who
# looks for rows with the same sum.

Content: TypeAlias = Annotated[bytes, Meta(max_length=32)]
"""A word about how rows are hashed, and the sum of the hashes; empty: not known."""

_SUM_BYTES, _WORD_BYTES = 16, 8
_MOST = (1 << 8 * _SUM_BYTES) - 1
_MESSAGES = b"blake2b "

_encode = msgspec.msgpack.Encoder().encode


def summed(word: bytes, total: int) -> bytes:
    """The content of rows whose hashes, made as the word of eight bytes says, have this sum."""
    assert len(word) == _WORD_BYTES, "it is cut off again"
    return word + (total & _MOST).to_bytes(_SUM_BYTES, "big")


def of_messages(topic: str, entries: Iterable[tuple[bytes | None, bytes, Headers]]) -> bytes:
    """The content of messages: their topic, keys, values and headers, without Postroom's own."""
    total = 0
    for key, value, headers in entries:
        kept = [pair for pair in headers if not pair[0].startswith(HEADER_PREFIX)]
        row = blake2b(_encode((topic, key, value, kept)), digest_size=_SUM_BYTES)
        total += int.from_bytes(row.digest(), "big")
    return summed(_MESSAGES, total)


def joined(parts: Iterable[bytes]) -> bytes:
    """The content of all of these together; empty if that of one is not known, or if there are none."""
    found = list(parts)
    words = {part[:_WORD_BYTES] for part in found}
    if len(words) != 1 or not all(found):
        return b""
    return summed(words.pop(), sum(int.from_bytes(part[_WORD_BYTES:], "big") for part in found))


def differ(one: bytes, other: bytes) -> bool:
    """Whether these are surely not the same rows."""
    return one != other and bool(one) and one[:_WORD_BYTES] == other[:_WORD_BYTES]


# ---- decisions, and what they publish ----

DUTY = "staging"
"""The lease of whoever finishes decisions that were left, and drops what nobody decided."""

NAME_CHARS = 120

Span = tuple[int, int]
"""The first and the last offset."""

SourceName = Annotated[str, Meta(max_length=1000)]
"""Of a partition of a job's source, as the source calls it."""

Segment = tuple[str, int]
"""Its name, and how many messages it has."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What a job wants its batch to consist of."""

    segments: Annotated[tuple[tuple[Label, Whole], ...], Meta(max_length=MOST_SEGMENTS)] = ()
    rows: Whole = 0  # all that its tasks saw, also those that were left out
    source: Annotated[dict[SourceName, tuple[Position, Position]], Meta(max_length=MOST_SEGMENTS)] = field(
        default_factory=dict
    )  # by source partition, of all these rows
    marks: Annotated[dict[SourceName, Position], Meta(max_length=MOST_SEGMENTS)] = field(
        default_factory=dict
    )  # rows at or below them were left out
    content: Content = b""  # of all these rows; empty: it is not to be compared


@dataclass(frozen=True, slots=True)
class StagedQuery:
    """What is known of a query."""

    batch: int  # the newest that was decided; -1: none
    marks: Mapping[str, int] = field(default_factory=dict)
    owner: str | None = field(default=None, compare=False)  # "": a job with the database; None: nobody yet


@dataclass(frozen=True, slots=True)
class PublishedSpan:
    """Where messages of a batch are: between these offsets, maybe with others among them."""

    topic_id: int
    partition_id: int
    first: int
    last: int
    messages: int


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the publishing of a decision is."""

    places: Mapping[int, PublishedSpan] = field(default_factory=dict)  # by partition
    sequences: Mapping[int, int] = field(default_factory=dict)  # by partition: the producer's next one
    dropped: int = 0  # messages of topics that were deleted meanwhile


@dataclass(frozen=True, slots=True)
class OpenMove:
    """The stamp: what is going to be stored where, under the decision's producer (I12)."""

    planned: tuple[Planned, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """What a batch of a query consists of, for ever; and how far it is published."""

    query: str
    batch: int
    revision: int  # 1, and more if the batch came back with rows that were new
    segments: tuple[Segment, ...]
    rows: int
    source: Mapping[str, Span]
    decided_at: int
    published_at: int = 0  # 0: not yet
    topics: tuple[int, ...] = ()  # ids
    producer_id: int = -1
    step: int = 0  # grows with each change: whoever knows another one knows nothing
    progress: Progress = field(default_factory=Progress)
    move: OpenMove | None = None
    content: bytes = b""

    @property
    def messages(self) -> int:
        return sum(messages for _, messages in self.segments)


def owner_after(query: str, owner: str | None, principal: str) -> str:
    """Whose the query is once the principal has used it; PermissionDenied if it is another's.

    `principal`: "" is a job with the database itself.
    """
    if owner is None:
        return principal
    if principal in ("", owner):
        return owner
    raise PermissionDenied(
        f"query {query!r} belongs to another: choose another name; or whoever administers the queue gives it "
        f"to you, with `postroom access give-query {query!r} {principal}`",
        principal=principal,
    )


def revision_for(known: StagedQuery, recorded: Decision | None, batch: int, wish: Wish) -> int | None:
    """The revision of the decision that is to be written; None: the recorded one is what counts.

    StagingConflict if the wish is for other rows than were decided, and it cannot be told which.
    """
    if recorded is not None and _same(recorded, wish):
        return None
    if recorded is None and batch > known.batch:
        _check_marks(known, batch, wish)
        _check_brought(known, batch, wish)
        return 1
    if not wish.source and (wish.rows or recorded is None):
        raise StagingConflict(_other_rows(known, recorded, batch, wish), batch=batch)
    _check_brought(known, batch, wish)
    if not wish.segments:
        return None if recorded is not None else 1
    _check_marks(known, batch, wish)
    return 1 if recorded is None else recorded.revision + 1


def _same(recorded: Decision, wish: Wish) -> bool:
    """Whether the batch comes with the rows it came with before, as far as can be told."""
    if recorded.source or wish.source:
        return dict(recorded.source) == dict(wish.source)
    return recorded.rows == wish.rows and not differ(recorded.content, wish.content)


def _check_marks(known: StagedQuery, batch: int, wish: Wish) -> None:
    """What was left out is what was decided before; else somebody else has decided meanwhile."""
    for partition in wish.source:
        if known.marks.get(partition, -1) > wish.marks.get(partition, -1):
            raise StagingConflict(
                f"another run of this query has decided rows up to {known.marks[partition]} of source "
                f"partition {partition!r} while batch {batch} was staged: see that one driver alone uses the "
                "checkpoint, and start it again",
                batch=batch,
            )


def _check_brought(known: StagedQuery, batch: int, wish: Wish) -> None:
    """Rows that were seen are staged, or were decided before: else they would be lost without a word.

    Source offsets may have holes, so that it cannot be told how many rows a span has; but its last one is
    there, and is staged if it lies above the mark.
    """
    messages, new = sum(count for _, count in wish.segments), 0
    for partition, (first, last) in wish.source.items():
        if not 0 <= first <= last:
            raise StagingConflict(
                f"source partition {partition[:NAME_CHARS]!r} goes from {first} to {last}: source offsets "
                "count up from 0",
                batch=batch,
            )
        new += last > known.marks.get(partition, -1)
    if new > messages or (wish.rows and not wish.source and not messages):
        raise StagingConflict(
            f"batch {batch} has {wish.rows} rows, {messages} messages are staged for it, and the others were "
            "not decided before: stage every row above the marks, then commit",
            batch=batch,
        )


def _other_rows(known: StagedQuery, recorded: Decision | None, batch: int, wish: Wish) -> str:
    if recorded is not None and recorded.rows == wish.rows:
        return (
            f"batch {batch} was published with {wish.rows} rows, and comes again with as many of other "
            "content: nothing was written. To publish these as well, give them a query or batch of their "
            "own. If the job makes other rows at each run (rand, current_timestamp), let what was published "
            "first count: failOnOtherContent=false in Spark, staging(…, compare=False) in Python"
        )
    if recorded is None:
        what = f"batch {batch} comes after batch {known.batch} was published, and is not remembered"
    else:
        what = f"batch {batch} was published with {recorded.rows} rows, and comes back with {wish.rows}"
    return (
        f"{what}: the checkpoint was set back, and without source offsets nobody can tell which rows are "
        "new. Write the columns source_partition and source_offset, so that this is done by itself; to go "
        "on now, begin with a new checkpoint behind what was published"
    )


def marks_after(known: StagedQuery, wish: Wish) -> dict[str, int]:
    """The query's marks once this is decided; they never go back. `revision_for` has let it through."""
    marks = dict(known.marks)
    for partition, (_, last) in wish.source.items():
        marks[partition] = max(last, marks.get(partition, -1))
    return marks


def advanced(progress: Progress, stored: Sequence[tuple[Planned, int, int]], dropped: int = 0) -> Progress:
    """The progress once these are stored: (what was planned, its topic, its first offset)."""
    places, sequences = dict(progress.places), dict(progress.sequences)
    for one, topic_id, offset in stored:
        sequences[one.partition_id] = next_sequence(one.sequence, one.records)
        last, before = offset + one.records - 1, places.get(one.partition_id)
        first = offset if before is None else min(before.first, offset)
        last = last if before is None else max(before.last, last)
        messages = one.records + (0 if before is None else before.messages)
        places[one.partition_id] = PublishedSpan(topic_id, one.partition_id, first, last, messages)
    return Progress(places, sequences, progress.dropped + dropped)


def check_name(name: object, what: str) -> str:
    """The name of a query or a segment."""
    if not isinstance(name, str) or not 0 < len(name) <= NAME_CHARS or not name.isprintable():
        raise InvalidSetting(f"{what}={name!r}: a text of 1 to {NAME_CHARS} printable characters")
    return name


def split_batches(data: bytes) -> list[bytes]:
    """Batches that follow each other, each of them checked."""
    found = list(batches_in(data))
    for one in found:
        verify(one)
    return found
