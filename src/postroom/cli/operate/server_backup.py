"""What to run to back up or restore a queue on a database server: its own programs do it, and do it better.

Must never show a password: the programs ask for it, or have it from a file of theirs.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import typer

from ...address import Address
from ..framework import exits, show
from ..framework.command import Run

__all__ = ["Advice", "backing_up", "give_advice", "restoring"]


class Advice(NamedTuple):
    run: tuple[str, ...]  # commands, in this order
    better: str  # what loses less
    never: tuple[str, ...]  # what must not be done


def give_advice(run: Run, advice: Sequence[tuple[Run, Advice]], *, deed: str) -> None:
    """Print what to run on each server, and leave: nothing was done."""
    for one, said in advice:
        if run.json:
            show.json_line({"url": one.shown, **said._asdict()})
            continue
        typer.echo(f"# {one.shown}: run, with --url or POSTROOM_URL as now")
        for line in said.run:
            typer.echo(line)
        typer.echo(f"# better: {said.better}")
        for line in said.never:
            typer.echo(f"# never: {line}")
    message = f"nothing was {deed}: a queue on a database server is {deed} by the server's own programs; run "
    exits.say_error("usage", f"{message}what is printed", as_json=run.json)
    raise typer.Exit(exits.USAGE)


def backing_up(address: Address, target: Path) -> Advice:
    if address.kind == "postgresql":
        return Advice(
            (_line("pg_dump", "--format=custom", f"--file={target}.dump", _plain(address)),),
            "pg_basebackup with WAL archiving (PITR) loses nothing that was archived",
            (
                "leave tables out: log and progress must be of one moment",
                "copy the files of a server that runs",
            ),
        )
    file = shlex.quote(f"{target}.sql")
    return Advice(
        (f"{_line('mariadb-dump', '--single-transaction', *_server(address))} > {file}",),
        "mariadb-backup with the binary log kept loses nothing that was logged",
        (
            "leave --single-transaction out: it is what makes the dump one moment",
            "make or delete a topic meanwhile: the dump ends with an error",
            "copy the files of a server that runs",
        ),
    )


def restoring(address: Address, source: Path) -> Advice:
    after = ("postroom doctor", "postroom restored")  # with the same --url, whose password is not shown
    never = (
        "restore into a database that has tables: make a new, empty one",
        "restore while a process of Postroom uses the database",
        "leave `postroom restored` out: streams would not see that offsets are given again",
    )
    if address.kind == "postgresql":
        line = _line(
            "pg_restore", "--no-owner", "--exit-on-error", f"--dbname={_plain(address)}", str(source)
        )
        return Advice((line, *after), "with PITR, recover to the last archived WAL, then run the rest", never)
    line = f"{_line('mariadb', *_server(address))} < {shlex.quote(str(source))}"
    return Advice((line, *after), "with mariadb-backup, replay the binary log, then run the rest", never)


def _plain(address: Address) -> str:
    """As libpq spells it: no `postgresql+psycopg`."""
    return f"postgresql:{address.shown.partition(':')[2]}"


def _server(address: Address) -> list[str]:
    server = dict(address.server)
    where = [f"--host={server['host']}", f"--port={server['port']}"]
    if "unix_socket" in server:
        where = [f"--socket={server['unix_socket']}"]
    user = [f"--user={server['user']}"] if server["user"] else []
    return [*where, *user, *(["--password"] if server["password"] else []), str(server["database"])]


def _line(*words: str) -> str:
    return shlex.join(words)
