"""The progress row of a group and a partition: its columns, and what is counted in them.

It is the lock of every progress verb (I1). Besides the cursor it keeps what reads would have to look for:
where the deliveries begin, when the first of them is due, who holds the partition (I5, I19), and where the
parked lines begin (I27). The column `lowest` is what others read: the lowest offset that is unsettled, be it
in a delivery or in a line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..model.delivery import Holder
from .session import Transaction

__all__ = ["MAKE", "ROW", "Row", "lock", "save"]

_SAMPLE_MS = 10_000  # rates are measured over one to two of these

_COLUMNS = (
    "generation", "next_new", "lowest", "next_due", "deliveries", "settled", "first_wait_ms", "sampled_at",
    "sampled", "earlier_at", "earlier", "drained", "recalled", "delivered_from", "parked_from", "parked",
    "holder_token", "holder", "holder_until",
)  # fmt: skip
_KEY = "group_id = ? AND partition_id = ?"
ROW = f"SELECT {', '.join(_COLUMNS)} FROM postroom_progress WHERE {_KEY}"
MAKE = f"""INSERT INTO postroom_progress (group_id, partition_id, {", ".join(_COLUMNS)})
            VALUES (?, ?, {", ".join("?" * len(_COLUMNS))})"""
_SAVE = f"UPDATE postroom_progress SET {', '.join(f'{c} = ?' for c in _COLUMNS)} WHERE "
_LOCK = f"SELECT {', '.join(_COLUMNS)} FROM postroom_progress WHERE "
_TABLE, _KEY_COLUMNS = "postroom_progress", ("group_id", "partition_id")


def lock(tx: Transaction, key: tuple[int, int]) -> Sequence[Any] | None:
    """The row's columns; it is changed by every poll and ack, and its past versions may pile up (I19)."""
    return tx.locked(_LOCK + tx.dialect.newest(_TABLE, _KEY_COLUMNS), *key, key[-1])


def save(tx: Transaction, row: Row, key: tuple[int, int]) -> None:
    """Of a row that is locked."""
    tx.do(_SAVE + tx.dialect.at_newest(_TABLE, _KEY_COLUMNS), *row.columns, *key, key[-1])


@dataclass(slots=True)
class Row:
    """A progress row."""

    generation: int
    cursor: int
    lowest: int  # the lowest offset of a delivery; the cursor if there is none
    next_due: int | None
    deliveries: int = 0  # how many there are
    settled: int = 0
    first_wait_ms: int = 0
    sampled_at: int = 0
    sampled: int = 0
    earlier_at: int = 0
    earlier: int = 0
    drained: int = 0  # a sealed partition: all of it is settled, and that was flushed (I10)
    recalled: int = 0  # ordered groups: what its holder has received of a stopped key is out of date
    holder: Holder = field(default_factory=Holder)  # ordered groups
    parked_from: int | None = None  # ordered groups: the lowest offset of a parked line (I27)
    parked: int = 0  # and how many messages wait in them

    @staticmethod
    def of(raw: Sequence[Any]) -> Row:
        row = Row(*raw[:-6])
        row.lowest, row.parked_from, row.parked = raw[-6:-3]
        row.holder = Holder(*raw[-3:])
        return row

    @property
    def committed(self) -> int:
        """The lowest unsettled offset; the cursor if there is none."""
        return self.lowest if self.parked_from is None else min(self.lowest, self.parked_from)

    @property
    def columns(self) -> tuple[Any, ...]:
        return (
            self.generation, self.cursor, self.committed, self.next_due, self.deliveries, self.settled,
            self.first_wait_ms, self.sampled_at, self.sampled, self.earlier_at, self.earlier,
            self.drained, self.recalled, self.lowest, self.parked_from, self.parked, self.holder.token,
            self.holder.member, self.holder.until,
        )  # fmt: skip

    def sample(self, now: int) -> None:
        if now - self.sampled_at >= _SAMPLE_MS:
            self.earlier_at, self.earlier = (
                (self.sampled_at, self.sampled) if self.sampled_at else (now, self.settled)
            )
            self.sampled_at, self.sampled = now, self.settled

    def drain_per_s(self, now: int) -> float:
        passed = now - self.earlier_at
        return 1000 * (self.settled - self.earlier) / passed if self.earlier_at and passed > 0 else 0.0
