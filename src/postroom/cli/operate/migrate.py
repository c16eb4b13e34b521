"""`postroom migrate`: make Postroom's tables on a database server, or bring them up to date.

`--check` and `--sql` change nothing: the one says what is missing, for a start script or a monitor; the other
prints the statements, for somebody else to run. A queue in a SQLite file brings itself up to date whenever a
program opens it, so that there the command only does it sooner.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterable
from contextlib import AbstractContextManager, closing, nullcontext
from typing import TYPE_CHECKING, Annotated

import typer

from ...errors import InvalidURL, UsageError
from ..framework import exits, show
from ..framework.command import Run
from ..framework.show import answer

if TYPE_CHECKING:
    from ...store.admin import Session

__all__ = ["migrate", "restored"]


Check = Annotated[
    bool, typer.Option("--check", help="Only say what is missing; exit code 3 if something is.")
]
Sql = Annotated[bool, typer.Option("--sql", help="Only print the statements, for somebody else to run.")]

_ITSELF = "a queue in a SQLite file brings itself up to date when a program opens it"
_CREATES = re.compile(r"CREATE (?:UNLOGGED )?(TABLE|INDEX) (?:IF NOT EXISTS )?(\w+)")
_ADDS = re.compile(r"ALTER TABLE (\w+) ADD COLUMN (\w+)")


def migrate(run: Run, check: Check = False, sql: Sql = False) -> None:
    """Make Postroom's tables on a database server, or bring them up to date; on every shard that is named."""
    if check and sql:
        raise UsageError("--check and --sql both only look: leave one of them out")
    from ...store.admin import open_session

    run.refuse_missing()
    complete = True
    for one in run.databases():
        if one.address.kind == "memory":
            raise UsageError(f"{one.url} keeps nothing: name a queue with --url or POSTROOM_URL")
        if one.address.kind == "postroom":
            raise UsageError("a broker's tables are migrated on its database: name that with --url")
        with closing(open_session(one.address)) as session:
            if check:
                complete = _check(one, session) and complete
            elif sql:
                _print(one, session)
            else:
                _migrate(one, session)
    if not complete:
        raise typer.Exit(exits.CROSSED)


def _check(run: Run, session: Session) -> bool:
    from ...store.admin import VERSION

    have, missing = _state(session)
    if run.json:
        show.json_line({"url": run.shown, "version": have, "needed": VERSION, "missing": missing})
    if not missing:
        if not run.json:
            typer.echo(f"{run.shown} is up to date: schema version {have}")
        return True
    if not run.json:
        for change in missing:
            typer.echo(f"missing: {change}")
    state = f"has schema version {have}" if have else "has no Postroom tables"
    cure = _ITSELF if run.address.path is not None else "run `postroom migrate`"
    message = f"{run.shown} {state}, and this postroom needs {VERSION}: {cure}"
    exits.say_error("not_migrated", message, as_json=run.json)
    return False


def _print(run: Run, session: Session) -> None:
    from ...store.admin import ROLLING_SINCE, VERSION, script

    have, _ = _state(session)
    found = [] if run.address.path is not None else [_tidy(statement) for statement in script(session)]
    if run.json:
        show.json_line({"url": run.shown, "version": have, "needed": VERSION, "statements": found})
        return
    if run.address.path is not None:
        typer.echo(f"-- {_ITSELF}: there is nothing to run")
    elif not found:
        typer.echo(f"-- {run.shown} is up to date: schema version {have}")
    else:
        what = "Run all of it once" if have >= ROLLING_SINCE else "Stop Postroom, run all of it once"
        typer.echo(f"-- {run.shown}: from schema version {have} to {VERSION}. {what}.")
    for statement in found:
        typer.echo(f"{statement};")


def _migrate(run: Run, session: Session) -> None:
    from ...store import admin

    before, missing = _state(session)
    changes = len(missing)
    with _progress(run, changes):
        admin.migrate(session)
    fields = {"url": run.shown, "before": before, "version": admin.VERSION, "changes": changes}
    was = f"it had version {before}" if before else "it had none of them"
    said = f"has Postroom's tables, schema version {admin.VERSION}; {was}"
    if not changes:
        said = f"is up to date: schema version {admin.VERSION}"
    itself = f" ({_ITSELF})" if run.address.path is not None else ""
    answer(run, fields, f"{run.shown} {said}{itself}")


def _state(session: Session) -> tuple[int, list[str]]:
    """The version of the area that is furthest behind, and what all of them lack."""
    from ...store.admin import schema_state

    found = schema_state(session)
    return found.version, _changes(found.missing)


def _changes(statements: Iterable[str]) -> list[str]:
    """Return what the statements would make, for people: tables, columns, indexes."""
    found: dict[str, None] = {}
    for statement in statements:
        for kind, name in _CREATES.findall(statement):
            found[f"{kind.lower()} {name}"] = None
        for table, column in _ADDS.findall(statement):
            found[f"column {table}.{column}"] = None
    return list(found)


def _tidy(statement: str) -> str:
    """Indented as it would be typed, not as it stands in a module."""
    first, newline, rest = statement.partition("\n")
    return first + newline + textwrap.indent(textwrap.dedent(rest), "    ") if newline else first


def _progress(run: Run, changes: int) -> AbstractContextManager[None]:
    if run.json or not changes or not (sys.stdout.isatty() and sys.stderr.isatty()):
        return nullcontext()
    from ..framework.terminal import working

    return working(f"making {changes} changes …")


# ---- `postroom restored`: say that a queue was restored from a backup ----
# A database that was put back cannot tell. Whoever keeps offsets elsewhere, such as the checkpoint of a
# stream, mostly sees it by itself; this settles the cases in which nothing else could.


def restored(run: Run) -> None:
    """Say that the queue was restored from a backup: the last step of a restore."""
    from ...address import parse_shards
    from ...store import open_store

    if run.address.kind not in ("sqlite", "postgresql", "mysql"):
        raise InvalidURL(
            "it is written down in the queue's database: name that with --url, such as sqlite:///postroom.db"
        )
    run.refuse_missing()
    with closing(open_store(run.address, shards=parse_shards(run.shards))) as store:
        made = store.catalog.restored()
    said = f"{run.shown} was restored: streams that have read what it lost will say so"
    answer(run, {"url": run.shown, "incarnation": made}, said)
