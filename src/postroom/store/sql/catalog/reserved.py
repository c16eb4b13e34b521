"""Partitions that are in no route yet: their rows are written before anything of them is made.

A row gives the partition its number and its id, which are never used again (I11), and says on which shard it
is. Whoever reserved it makes its log and puts it into a route; what was reserved for nothing is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ....address import FIRST_SHARD
from ....errors import InvalidSetting
from ....model.topology.route import Range
from ..session import Transaction

__all__ = ["NEW", "forget_reserved", "refuse_shard", "reserve"]

NEW = "new"
"""The state of a partition that is in no route yet: its topic is being made, or a change is under way."""
_RESERVE = """INSERT INTO postroom_partitions
              (topic_id, number, state, next_offset, next_bytes, appended_at, volatile, shard, first_slot,
               last_slot)
              VALUES (0, ?, ?, 0, 0, ?, ?, ?, ?, ?)"""


def reserve(tx: Transaction, topic_id: int, volatile: bool, pieces: Sequence[Range]) -> list[tuple[int, int]]:
    """A number and an id for each: rows of partitions that are in no route yet."""
    number = 0
    if topic_id:  # else it is a new topic, and has none
        last = tx.one("SELECT MAX(number) FROM postroom_partitions WHERE topic_id = ?", topic_id)
        number = int(last[0]) + 1 if last and last[0] is not None else 0
    now, names = tx.now_ms(), []
    for at, piece in enumerate(pieces):
        row = (number + at, NEW, now, int(volatile), piece.shard, piece.first_slot, piece.last_slot)
        names.append((number + at, tx.insert(_RESERVE, *row)))
    tx.many("INSERT INTO postroom_trims (partition_id, log_start) VALUES (?, 0)", [(i,) for _, i in names])
    return names


def forget_reserved(tx: Transaction, partition_ids: Iterable[int]) -> None:
    """They will be in no route: their logs are to be dropped."""
    tx.many(
        "UPDATE postroom_partitions SET state = 'dropped' WHERE id = ? AND state = 'new'",
        [(partition_id,) for partition_id in partition_ids],
    )


def refuse_shard(tx: Transaction, name: str, *, moves: bool = False) -> None:
    """InvalidSetting if there is no such shard; for `moves`, if it takes no partitions."""
    if not name:
        return
    known: dict[str, str] = dict(tx.all("SELECT name, state FROM postroom_shards ORDER BY name"))
    if name not in known:
        there = ", ".join((FIRST_SHARD, *known)) if known else "the first one only"
        raise InvalidSetting(
            f"there is no shard {name!r}; there is {there}: `postroom shard list` shows them"
        )
    if moves and known[name] != "open":
        raise InvalidSetting(
            f"shard {name!r} is being drained and takes no partitions; name another, or open it again "
            "(open_shard)"
        )
