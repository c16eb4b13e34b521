"""Options of SQL tables: which of them count for a read, and which for a write.

A table is made once and used in all ways, so that it may have options of every kind; those that do not fit
a query are left out of it. What the query gives itself counts more, and is checked as everywhere.

Java (`jar/`) hands on a table's options as `option.NAME`, and says with the option `jar` what it asks:
`table`, these are the options of a table; `topic`, the same, and its topic has to be there; `topics`, which
there are.
Without the jar Spark shows the options of a table when it is made, and never again: then making one is
refused. Must never show a token or an address.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from ..errors import UsageError
from .options import CONNECTION, FORMATS, bad_option, kind_options, unknown_option

__all__ = ["Kind", "asked", "of_query"]

Kind = Literal["batch", "stream", "write"]

_PREFIX = "option."
_JAR = "jar"
_QUESTIONS = ("table", "topic", "topics")
_TOPICS = ("subscribe", "subscribepattern", "assign")
_SHAPE = ("includeheaders", "includesource", *map(str.lower, FORMATS))
_OF_TABLE = (*_TOPICS, *_SHAPE)  # what a table is, which a query does not change
_STRATEGY = "startingoffsetsbytimestampstrategy"
_NO_JAR = (
    "Spark does not keep the OPTIONS of a table, unless it has Postroom's jar: start the session with "
    "postroom.spark.session(), or with --jars $(python -m postroom.spark.jar). Without it, use CREATE "
    "TEMPORARY VIEW … USING postroom OPTIONS (…)"
)


def asked(options: Mapping[str, str]) -> str | None:
    """What Java asks; None if this is not about a table. Refuses unknown options of a table."""
    lower = {name.lower(): value for name, value in options.items()}
    ofs = [name.removeprefix(_PREFIX) for name in lower if name.startswith(_PREFIX)]
    if _JAR not in lower:
        if ofs:
            raise UsageError(_NO_JAR)
        return None
    if lower[_JAR] not in _QUESTIONS:
        raise unknown_option(_JAR, kind_options("batch"))
    known = tuple(dict.fromkeys((*kind_options("batch"), *kind_options("stream"), "topic")))
    for name in ofs:
        if name not in map(str.lower, known) and not name.startswith("url."):
            raise unknown_option(name, known)
    return lower[_JAR]


def of_query(options: Mapping[str, str], kind: Kind) -> dict[str, str]:
    """What counts for this query: its own options, and those of its table that fit."""
    if not options:
        raise UsageError(f"there are no options, not even url. Is this a table? {_NO_JAR}")
    if asked(options) is None:
        return dict(options)
    lower = {name.lower(): value for name, value in options.items() if name.lower() != _JAR}
    table = {n.removeprefix(_PREFIX): value for n, value in lower.items() if n.startswith(_PREFIX)}
    given = {name: value for name, value in lower.items() if not name.startswith(_PREFIX)}
    if kind == "write":
        return {**_for_writing(table), **given}
    for name in _OF_TABLE:
        if name in given:
            raise bad_option(name, "the table has it: set it in its OPTIONS, or for the catalog")
    return {**_for_reading(table, given, kind), **given}


def _for_reading(
    table: Mapping[str, str], given: Mapping[str, str], kind: Literal["batch", "stream"]
) -> dict[str, str]:
    names = {name.lower() for name in kind_options(kind)}
    found = {name: value for name, value in table.items() if name in names or name.startswith("url.")}
    if "topic" in table and not any(name in found for name in _TOPICS):
        found["subscribe"] = table["topic"]
    for side in ("starting", "ending"):  # a query says in another way where reading begins
        if any(_is_position(name, side) for name in given):
            found = {name: value for name, value in found.items() if not _is_position(name, side)}
    return found


def _is_position(name: str, side: str) -> bool:
    return name.startswith(side) and name != _STRATEGY


def _for_writing(table: Mapping[str, str]) -> dict[str, str]:
    found = {n: v for n, v in table.items() if n in CONNECTION or n.startswith("url.") or n == "topic"}
    names = [name.strip() for name in table.get("subscribe", "").split(",") if name.strip()]
    if "topic" not in found and len(names) == 1:
        found["topic"] = names[0]
    return found
