"""`postroom shard …`: list the databases of a queue, take one out, let it take partitions again (R6, R28).

A drain has two phases (I11). In the first every partition is moved off the shard, live; how many are left is
shown meanwhile. Then the shard holds sealed partitions and delayed messages only. It is empty once the groups
have read the ones, retention has dropped them, and the others were due: what it waits for is said by name.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...address import FIRST_SHARD
from ...config import DEFAULTS
from ...errors import CatalogError, StoreError, StoreUnavailable
from ...model.topology.names import REDRIVE_GROUP
from ...units import format_duration
from ..framework import names, show
from ..framework.command import Run, command, family
from ..framework.show import View, answer
from ..framework.terminal import Yes, agreed

if TYPE_CHECKING:
    from postroom import Connection, ShardInfo

__all__ = ["app"]

app = family("shard", "List the databases of a queue; take one out for maintenance.")

Name = Annotated[
    str,
    typer.Argument(metavar="NAME", help="The shard.", show_default=False, autocompletion=names.shards),
]


@command(app, "list")
async def list_shards(run: Run) -> None:
    """List the shards: what each is, whether it answers, and what it holds."""
    async with run.connect() as mq:
        found = await mq.shards()
    _SHARD.list(run, found)


@command(app, "drain")
async def drain(
    run: Run,
    name: Name,
    yes: Yes = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Do not return before the shard is empty and may be left out.")
    ] = False,
) -> None:
    """Move every partition off a shard, live; when it is empty it may be left out."""
    async with run.connect() as mq:
        before = await _find(mq, name)
        if before is not None and name != FIRST_SHARD and before.state != "away" and before.partitions:
            counted = (
                f"{_partitions(before.partitions)} will be moved to other shards, and it gets no new ones"
            )
            facts: dict[str, int | str] = {"shard": name, "partitions": before.partitions}
            agreed(run, f"drain shard {name!r}", facts, yes=yes, dry_run=False, counted=counted)
        began = time.perf_counter()
        info = await _drained(run, mq, name, before.partitions if before else 0)
        took_ms = (time.perf_counter() - began) * 1000
        moved = before.partitions - info.partitions if before else 0
        if not run.json:
            took = format_duration(max(1, round(took_ms)))
            typer.echo(f"shard {name} takes no partitions now; {_partitions(moved)} moved off it in {took}")
            sys.stdout.flush()
        if wait:
            info = await _emptied(run, mq, name)
        rests = await _rests(mq, name) if info.state != "empty" else []
    _say_state(run, info, rests, moved, took_ms)


@command(app, "open")
async def open_again(run: Run, name: Name) -> None:
    """Let a shard that was drained take partitions again."""
    async with run.connect() as mq:
        info = await mq.open_shard(name)
    said = f"shard {name} takes partitions again; `postroom route move` moves them there"
    answer(run, _fields(info), said)


async def _find(mq: Connection, name: str) -> ShardInfo | None:
    return next((info for info in await mq.shards() if info.name == name), None)


# ---- the two phases ----


async def _drained(run: Run, mq: Connection, name: str, partitions: int) -> ShardInfo:
    """The first phase. Errors are those of the drain itself; looking on is not worth one."""
    import asyncio

    work = asyncio.ensure_future(mq.drain_shard(name))
    with _progress(run, f"moving partitions off shard {name}") as said:
        while not (await asyncio.wait([work], timeout=DEFAULTS.tuning.cli.drain_check_s))[0]:
            try:
                info = await _find(mq, name)
            except StoreUnavailable:
                continue  # the drain says so itself, if it lasts
            said(f"{info.partitions if info else 0} of {partitions} left")
    return await work


async def _emptied(run: Run, mq: Connection, name: str) -> ShardInfo:
    """The second phase, which takes as long as it takes: Ctrl-C does no harm."""
    import asyncio

    with _progress(run, f"shard {name} runs empty") as said:
        while True:
            info = await _find(mq, name)
            assert info is not None, "a shard does not vanish"
            if info.state == "empty":
                return info
            if info.state == "open":
                raise StoreUnavailable(f"somebody has opened shard {name!r} again: it will not be empty")
            with suppress(StoreError, CatalogError):  # retention removes them while they are looked at
                said(_left(info, await _rests(mq, name)))
            await asyncio.sleep(DEFAULTS.tuning.cli.drained_check_s)


@contextmanager
def _progress(run: Run, what: str) -> Iterator[Callable[[str], None]]:
    """On a terminal one line that changes; else, for people, a line for each change; nothing for scripts."""
    if run.json:
        yield lambda text: None
    elif sys.stdout.isatty() and sys.stderr.isatty():
        with show.console(stderr=True).status(what) as status:
            yield lambda text: status.update(f"{what}: {text}")
    else:
        last = ""

        def line(text: str) -> None:
            nonlocal last
            if text != last:
                print(f"{what}: {text}", file=sys.stderr, flush=True)
            last = text

        yield line


# ---- what a shard waits for ----


@dataclass(frozen=True, slots=True)
class _Rest:
    """A sealed partition that is still there."""

    topic: str
    partition: int
    groups: tuple[str, ...]  # that have to read it
    retention_ms: int  # of its topic


async def _rests(mq: Connection, name: str) -> list[_Rest]:
    found = []
    for info in await mq.topics(internal=True):
        route = await mq.route(info.name)
        here = [piece.partition for piece in route.sealed if (piece.shard or FIRST_SHARD) == name]
        if not here:
            continue
        readers: dict[int, list[str]] = {number: [] for number in here}
        for group in await mq.groups(info.name):
            for number in await _unread(mq, info.name, group.name):
                readers.get(number, []).append(group.name)
        found += [_Rest(info.name, n, tuple(readers[n]), info.settings.retention_ms) for n in here]
    return found


async def _unread(mq: Connection, topic: str, group: str) -> list[int]:
    """The sealed partitions that a group has to read; one may be removed while it is looked at."""
    try:
        lag = await mq.lag(topic, group)
    except (StoreError, CatalogError):
        return []
    return [part.partition for part in lag.partitions if part.sealed and part.topic == topic]


def _left(info: ShardInfo, rests: list[_Rest]) -> str:
    read = sum(not rest.groups for rest in rests)
    parts = [
        f"{len(rests) - read} sealed with groups that have to read them",
        f"{read} sealed kept by retention",
        f"{show.messages(info.delayed)} delayed",
    ]
    return ", ".join(parts)


def _say_state(run: Run, info: ShardInfo, rests: list[_Rest], moved: int, took_ms: float) -> None:
    if run.json:
        waits = [
            {"topic": rest.topic, "partition": rest.partition, "groups": list(rest.groups)} for rest in rests
        ]
        show.json_line({**_fields(info), "moved": moved, "took_ms": round(took_ms, 1), "waits": waits})
        return
    if info.state == "empty":
        typer.echo(f"shard {info.name} is empty: leave it out of --shard, POSTROOM_SHARDS and shards= now")
        return
    typer.echo(f"shard {info.name} is not empty yet:")
    for rest in rests:
        typer.echo(f"  partition {rest.partition} of topic {rest.topic} {_why(rest)}")
    if info.delayed:
        typer.echo(f"  {show.messages(info.delayed, 'waits', 'wait')} there until due")
    typer.echo(f"`postroom shard drain {info.name} --wait` waits for it, `postroom shard list` shows it")


def _why(rest: _Rest) -> str:
    if REDRIVE_GROUP in rest.groups:
        return "is sealed, with dead letters in it: redrive or discard them (`postroom dead`)"
    if rest.groups:
        plural = "has" if len(rest.groups) == 1 else "have"
        return f"is sealed, and {', '.join(rest.groups)} {plural} to read it to its end"
    kept = f"for {format_duration(rest.retention_ms)}" if rest.retention_ms else "without a limit"
    return (
        f"is sealed and read; retention keeps it {kept} (`postroom topic alter {rest.topic} --drop-settled`)"
    )


def _partitions(number: int) -> str:
    return f"{number} partition{'' if number == 1 else 's'}"


def _fields(info: ShardInfo) -> dict[str, Any]:
    return {
        "shard": info.name,
        "kind": info.kind,
        "state": info.state,
        "partitions": info.partitions,
        "sealed": info.sealed,
        "delayed": None if info.state == "away" else info.delayed,
    }


_SHARD: View[ShardInfo] = View(
    fields=_fields,
    columns={
        "shard": lambda info: info.name,
        "kind": lambda info: info.kind,
        "state": lambda info: info.state,
        "partitions": lambda info: str(info.partitions),
        "sealed": lambda info: str(info.sealed),
        "delayed": lambda info: "–" if info.state == "away" else show.count(info.delayed),
    },
    numbers=("partitions", "sealed", "delayed"),
)
