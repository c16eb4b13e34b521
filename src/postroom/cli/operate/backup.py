"""`postroom backup` and `postroom restore`: checked copies of a queue in SQLite files.

    backup   copy to TARGET.partial: all progress, then all logs ─▶ check ─▶ rename to TARGET
    restore  copy beside the queue, to NAME.restoring ─▶ check ─▶ a new incarnation ─▶ rename to NAME

A folder with the name that was asked for is a whole, checked backup, and a queue that can be opened is wholly
restored and says so: what is cut off in between has another name. Progress goes first, in both: an older
progress with a newer log gives messages again; the other way round they would be lost.

On a database server its own programs do it, and do it better: what to run is said. Must never show a password
there: the programs ask for it, or have it from a file of theirs.
"""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from ...errors import StoreBusy, StoreCorrupt, StoreFull, StoreUnavailable, UsageError
from ..framework import exits, show
from ..framework.command import Run

if TYPE_CHECKING:
    from ...address import Address

__all__ = ["backup", "restore"]

Target = Annotated[Path, typer.Argument(metavar="TARGET", help="The folder to make for the copies.")]
Source = Annotated[Path, typer.Argument(metavar="SOURCE", help="The folder that `postroom backup` made.")]

_PROGRESS = ".progress"
_BESIDE = ("", "-wal", "-shm", "-journal")
_AREAS = ("", _PROGRESS, ".volatile")
_DAMAGED = "keep the backups you have, and see what `postroom doctor` says of queue and disk"
_LISTS_SHARDS = 3  # the schema version since which a queue knows its shards

Begin = Callable[[str], Callable[[int, int], None]]  # a file's turn: returns what is told of its bytes


def backup(run: Run, target: Target) -> None:
    """Copy a queue in SQLite files while it is in use, and check the copy. On servers: say what to run."""
    logs = _logs(run, lambda address: _backing_up(address, target), deed="backed up")
    run.refuse_missing()
    _refuse_incomplete(run, logs)
    with _explained(f"{run.shown} could not be backed up", _DAMAGED), _new_folder(target) as folder:
        copies = {name: _folder_of(folder, name) / log.name for name, log in logs.items()}
        _refuse_full(target.absolute().parent, map(_size, logs.values()))
        with _copying(run) as begin:
            _copy(logs, copies, begin)
            _check(copies, begin)
        said = _figures(copies)
    sentence = f"backed up {run.shown} to {target}: {_sentence(said)}"
    show.answer(run, {"url": run.shown, "target": str(target), **said}, sentence)


def restore(run: Run, source: Source) -> None:
    """Put a backup where no queue is, check it, and say that it was restored. On servers: say what to run."""
    logs = _logs(run, lambda address: _restoring(address, source), deed="restored")
    copies = {name: _log_in(_folder_of(source, name)) for name in logs}
    for path in logs.values():
        _refuse_taken(path)
    with _explained(f"{source} could not be restored", "use another backup"), ExitStack() as stack:
        staged = {name: stack.enter_context(_staging(path)) / path.name for name, path in logs.items()}
        for name, path in logs.items():
            _refuse_full(path.absolute().parent, [_size(copies[name])])
        with _copying(run) as begin:
            for name, copy in copies.items():
                _put(copy, staged[name], begin)
            _check(staged, begin)
        incarnation, tokens = _declare(run, staged)
        said = {**_figures(staged), "incarnation": incarnation}
        _move(staged, logs)
    sentence = f"restored {run.shown} from {source}: {_sentence(said)}"
    show.answer(
        run,
        {"url": run.shown, "source": str(source), **said},
        f"{sentence}\nit has a new incarnation: streams that have read what it lost will say so",
    )
    if tokens and not run.json:
        exits.say_note(
            "tokens that were removed or rotated since are valid again: see `postroom access list`"
        )


# ---- which files ----


def _logs(run: Run, advise: Callable[[Address], Advice], *, deed: str) -> dict[str, Path]:
    """Return the log of each shard, the first one's under ""; leaves with advice if one is on a server."""
    found: dict[str, Path] = {}
    servers: list[tuple[Run, Advice]] = []
    for name, one in zip(("", *run.shards), run.databases(), strict=True):
        address = one.address
        if address.kind == "memory":
            raise UsageError(f"{one.url} keeps nothing: name a queue with --url or POSTROOM_URL")
        if address.kind == "postroom":
            raise UsageError("brokers keep nothing themselves: name their database with --url")
        if address.path is None:
            servers.append((one, advise(address)))
        else:
            found[name] = address.path
    if servers:
        _give_advice(run, servers, deed=deed)
    return found


def _folder_of(folder: Path, shard: str) -> Path:
    return folder / f"shard-{shard}" if shard else folder


def _progress_of(log: Path) -> Path:
    return log.with_name(f"{log.name}{_PROGRESS}")


def _log_in(folder: Path) -> Path:
    """Return the log in a folder with a backup."""
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}: name the one that `postroom backup` made")
    found = [file.with_name(file.name.removesuffix(_PROGRESS)) for file in folder.glob(f"*{_PROGRESS}")]
    logs = [log for log in found if log.is_file()]
    if len(logs) != 1:
        has = "several queues" if logs else "no log with its progress beside it"
        raise UsageError(f"{folder} has {has}: name a folder with one backup, as `postroom backup` makes it")
    if pids := _users(logs[0]):
        raise StoreBusy(
            f"{logs[0]} is in use (by {_processes(pids)}), and no backup: make one with `postroom backup`"
        )
    return logs[0]


def _users(log: Path) -> list[int]:
    from ...store.copies import users_of

    return users_of(log.with_name(f"{log.name}{area}") for area in _AREAS)


def _processes(pids: list[int]) -> str:
    return f"process{'es' if len(pids) > 1 else ''} {', '.join(map(str, pids))}"


# ---- what is refused ----


def _refuse_incomplete(run: Run, logs: Mapping[str, Path]) -> None:
    """Raise if a file is no queue, has no progress beside it, or if a shard is missing or another's."""
    import sqlite3

    from ...store.admin import check_shards, open_session
    from ...store.copies import schema_version

    versions = []
    for log in logs.values():
        try:
            versions.append(schema_version(log))
        except sqlite3.Error as error:
            raise StoreCorrupt(
                f"{log} cannot be read ({error}): `postroom doctor` says more; restore the last good backup"
            ) from error
        if not versions[-1]:
            raise UsageError(f"{log} is not a queue of Postroom: name one with --url or POSTROOM_URL")
        if not _progress_of(log).is_file():
            raise StoreUnavailable(
                f"{_progress_of(log)} is missing: put it back; or open the queue once (`postroom topic "
                "list`), which makes a new one: every group begins again at its start"
            )
    if min(versions) >= _LISTS_SHARDS:
        with ExitStack() as stack:
            first, *others = (
                stack.enter_context(closing(open_session(one.address))) for one in run.databases()
            )
            check_shards(first, dict(zip(run.shards, others, strict=True)))


def _refuse_taken(path: Path) -> None:
    """Raise if there is a queue, or what is left of one: a restored file beside an old one is destroyed."""
    if pids := _users(path):
        raise StoreBusy(
            f"{path} is in use (by {_processes(pids)}), removed or not: stop every process that uses the "
            "queue, then restore"
        )
    files = [path.with_name(f"{path.name}{area}{end}") for area in _AREAS for end in _BESIDE]
    if taken := [file.name for file in files if file.exists()]:
        raise UsageError(
            f"there is {' and '.join(taken)} in {path.absolute().parent}: stop every process that uses the "
            "queue and move all its files away, or restore to another --url"
        )
    if not path.absolute().parent.is_dir():
        raise UsageError(f"there is no folder {path.absolute().parent}: make it first, or correct the URL")


def _size(log: Path) -> int:
    files = [file.with_name(f"{file.name}{end}") for file in (log, _progress_of(log)) for end in ("", "-wal")]
    return sum(file.stat().st_size for file in files if file.exists())


def _refuse_full(folder: Path, sizes: Iterable[int]) -> None:
    """Before a disk is filled, on which the queue itself may be."""
    from ...units import format_bytes

    needed, free = sum(sizes), shutil.disk_usage(folder).free
    if needed > free:
        raise StoreFull(
            f"{format_bytes(needed)} are needed in {folder}, and {format_bytes(free)} are free: free some "
            "space, or name a folder on another disk"
        )


@contextmanager
def _explained(what: str, cure: str) -> Iterator[None]:
    """Say what to do about an error of the disk; what was begun has been removed."""
    import sqlite3

    try:
        yield
    except (OSError, sqlite3.Error) as error:
        if getattr(error, "errno", 0) == errno.ENOSPC or "is full" in str(error):
            raise StoreFull(
                f"{what}: no space left; free some, or name another disk, and try again"
            ) from error
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise StoreCorrupt(f"{what}: {error}; {cure}") from error
        raise StoreUnavailable(
            f"{what} ({error}): check that files, folder and disk are there and writable, and try again"
        ) from error
    except StoreCorrupt as error:
        raise StoreCorrupt(f"{what}: {error}; {cure}") from error


# ---- folders that appear whole, or not at all ----


@contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    from ...store.copies import flush

    if target.exists() or target.is_symlink():
        raise UsageError(f"{target} is there already, and nothing is overwritten: name a new folder")
    parent = target.absolute().parent
    if not parent.is_dir():
        raise UsageError(f"there is no folder {parent}: make it first, or name another")
    with _removed(target.absolute().with_name(f"{target.absolute().name}.partial")) as folder:
        yield folder
        for made in (folder, *(inner for inner in folder.iterdir() if inner.is_dir())):
            flush(made)
        folder.rename(target)
        flush(parent)


def _staging(path: Path) -> AbstractContextManager[Path]:
    return _removed(path.with_name(f"{path.name}.restoring"))


@contextmanager
def _removed(folder: Path) -> Iterator[Path]:
    """Make a folder that is removed in the end, if it is still there: also after Ctrl-C."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        raise UsageError(
            f"{folder} is there: another run is at it, or was cut off; if none is, remove it and try again"
        ) from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# ---- copies ----


def _copy(logs: Mapping[str, Path], copies: Mapping[str, Path], begin: Begin) -> None:
    from ...store.copies import copy_database

    for copy in copies.values():
        copy.parent.mkdir(mode=0o700, exist_ok=True)
    for part in (_progress_of, lambda log: log):  # all progress before any log
        for name, log in logs.items():
            copy_database(part(log), part(copies[name]), begin(f"copying {part(log).name}"))


def _put(copy: Path, target: Path, begin: Begin) -> None:
    """Copy the files of a backup: a log that somebody copied by hand may have its `-wal` beside it."""
    from ...files import open_private
    from ...store.copies import flush

    for end in (_PROGRESS, f"{_PROGRESS}-wal", "", "-wal"):
        source = copy.with_name(f"{copy.name}{end}")
        if not source.exists():
            continue
        told, done, total = begin(f"copying {source.name}"), 0, source.stat().st_size
        to = target.with_name(f"{target.name}{end}")
        with source.open("rb") as reader, open(open_private(to), "wb") as writer:
            while block := reader.read(4 * 1024 * 1024):
                done += writer.write(block)
                told(done, total)
        flush(to)


def _check(logs: Mapping[str, Path], begin: Begin) -> None:
    """Raise StoreCorrupt if a copy has a fault, or is not of one queue."""
    from ...store.copies import check_file, schema_version, settle

    for log in logs.values():
        for file in (_progress_of(log), log):
            begin(f"checking {file.name}")
            check_file(file)
            if not schema_version(file):
                raise StoreCorrupt(f"{file.name} has no tables of Postroom")
    for log in logs.values():
        _check_pair(log)
        settle(_progress_of(log))
        settle(log)


def _check_pair(log: Path) -> None:
    """Raise StoreCorrupt if the progress is another log's, or ahead of this one."""
    from ...address import Address
    from ...store.admin import check_pair, open_session
    from ...store.copies import schema_version

    if schema_version(log) >= _LISTS_SHARDS:  # before, partitions were not told apart as they are now
        with closing(open_session(Address("sqlite", path=log))) as session:
            check_pair(session)


def _declare(run: Run, staged: Mapping[str, Path]) -> tuple[str, int]:
    """Give the queue a new incarnation, before anybody can open it; that, and how many tokens it has."""
    from ...address import Address
    from ...store import open_store

    others = {name: Address("sqlite", path=path) for name, path in staged.items() if name}
    with closing(open_store(replace(run.address, path=staged[""]), shards=others or None)) as store:
        return store.catalog.restored(), len(store.access.principals())


def _move(staged: Mapping[str, Path], logs: Mapping[str, Path]) -> None:
    """Put the files where they belong; the first log last: it is what makes them a queue."""
    from ...store.copies import flush, settle

    for path in logs.values():
        _refuse_taken(path)
    for part in (_progress_of, lambda log: log):
        for name in sorted(staged, reverse=True):
            settle(part(staged[name]))
            os.rename(part(staged[name]), part(logs[name]))
    for path in logs.values():
        flush(path.absolute().parent)


# ---- what is said ----


def _figures(copies: Mapping[str, Path]) -> dict[str, int | str]:
    from ...store.copies import contents, schema_version

    found = {name: contents(log) for name, log in copies.items()}
    return {
        "topics": found[""].topics,
        "messages": sum(one.messages for one in found.values()),
        "bytes": sum(map(_size, copies.values())),
        "version": schema_version(copies[""]),
    }


def _sentence(said: Mapping[str, int | str]) -> str:
    from ...units import format_bytes

    topics, messages, size = int(said["topics"]), int(said["messages"]), format_bytes(int(said["bytes"]))
    counted = f"{show.count(topics)} topic{'' if topics == 1 else 's'}, {show.messages(messages)}, {size}"
    return f"{counted}, schema version {said['version']}, checked"


def _copying(run: Run) -> AbstractContextManager[Begin]:
    if run.json or not (sys.stdout.isatty() and sys.stderr.isatty()):
        return nullcontext(lambda name: lambda done, total: None)
    from ..framework.terminal import copying

    return copying()


# ---- on a database server ----


class Advice(NamedTuple):
    run: tuple[str, ...]  # commands, in this order
    better: str  # what loses less
    never: tuple[str, ...]  # what must not be done


def _give_advice(run: Run, advice: Sequence[tuple[Run, Advice]], *, deed: str) -> None:
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


def _backing_up(address: Address, target: Path) -> Advice:
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


def _restoring(address: Address, source: Path) -> Advice:
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
