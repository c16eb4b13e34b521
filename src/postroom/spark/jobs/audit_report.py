"""What an audit has found: counts, and a report with a line of JSON for each message that is bad.

A check is a DataFrame in which every row knows by flags what is wrong with it. It is counted first; rows with
a flag are listed only if there are some. A report is a whole one or none: it gets its name when it is done.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ...errors import InvalidSetting
from ...files import open_private

__all__ = ["FIELDS", "Bad", "Check", "Flag", "Found", "Report"]

FIELDS = ("id", "key", "number", "last_number", "partition", "offset", "last_offset")
"""Of a line in the report, behind the stage and the kind."""


@dataclass(frozen=True, slots=True)
class Bad:
    stage: str  # stored, handled: where it went wrong
    kind: str  # lost, repeated, out of order, unknown, gap
    by: str  # number, id, offset: what told it; the same loss may be told by two of them
    messages: int


@dataclass(frozen=True, slots=True)
class Flag:
    """`when`: a column that is true for a bad row; `messages`: how many of them it stands for."""

    stage: str
    kind: str
    when: Any
    messages: Any = None
    fields: Mapping[str, Any] = field(default_factory=dict)  # instead of those of the row


@dataclass(frozen=True, slots=True)
class Found:
    counts: Mapping[str, int]
    bad: tuple[Bad, ...]


@dataclass(frozen=True, slots=True)
class Check:
    what: str
    by: str
    rows: Any
    flags: Sequence[Flag]
    counts: Mapping[str, Any]  # columns that are true where a row counts
    fields: Mapping[str, Any]  # of a line in the report

    def count(self) -> Found:
        from pyspark.sql import functions as F

        sums = [F.count_if(when).alias(f"count_{name}") for name, when in self.counts.items()]
        for n, flag in enumerate(self.flags):
            each = F.lit(1) if flag.messages is None else flag.messages
            sums.append(F.sum(F.when(flag.when, each.cast("bigint"))).alias(f"flag_{n}"))
        row = self.rows.agg(*sums).head()
        bad = tuple(
            Bad(flag.stage, flag.kind, self.by, row[f"flag_{n}"])
            for n, flag in enumerate(self.flags)
            if row[f"flag_{n}"]
        )
        return Found({name: row[f"count_{name}"] for name in self.counts}, bad)

    def listed(self) -> Any:
        """A DataFrame in one part, sorted: a row for each line of the report."""
        from pyspark.sql import functions as F

        found = F.array(*(F.when(flag.when, self._line(flag)) for flag in self.flags))
        some = self.rows.select(F.filter(found, lambda line: line.isNotNull()).alias("found"))
        lines = some.where(F.size("found") > 0).select(F.inline("found"))
        order = [F.col(name).asc_nulls_last() for name in ("stage", "kind", *FIELDS)]
        return lines.repartition(1).sortWithinPartitions(*order)

    def _line(self, flag: Flag) -> Any:
        from pyspark.sql import functions as F

        kinds = {"id": "string", "key": "string"}
        own = {**self.fields, **flag.fields}
        values = [
            (own[name] if name in own else F.lit(None)).cast(kinds.get(name, "bigint")).alias(name)
            for name in FIELDS
        ]
        return F.struct(F.lit(flag.stage).alias("stage"), F.lit(flag.kind).alias("kind"), *values)


class Report:
    """Is there only if something was written into it."""

    def __init__(self, path: str | None) -> None:
        self._wanted = Path(path) if path else None
        self._part: Any = None
        self.path: str | None = None
        if self._wanted is not None and not self._wanted.absolute().parent.is_dir():
            raise InvalidSetting(f"report={path!r}: there is no folder {self._wanted.absolute().parent}")

    def __enter__(self) -> Self:
        if self._wanted is not None:
            self._wanted.unlink(missing_ok=True)  # of an earlier run
        return self

    @property
    def _beside(self) -> Path:
        assert self._wanted is not None
        return self._wanted.with_name(f".{self._wanted.name}.part")

    def write(self, lines: Any) -> None:
        if self._part is None:
            self._part = open(open_private(self._beside), "w", encoding="utf-8")  # noqa: SIM115
            self._part.truncate()  # of an earlier run
        for row in lines.toLocalIterator():
            line = {name: value for name, value in row.asDict().items() if value is not None}
            self._part.write(json.dumps(line, ensure_ascii=False) + "\n")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._part is None:
            return
        self._part.close()
        if error is not None:
            self._beside.unlink(missing_ok=True)
            return
        os.replace(self._beside, str(self._wanted))
        self.path = str(self._wanted)
