"""`postroom consume`: take messages as a member of a group, print them, ack them.

A message is acked only after it was written and flushed: whoever reads the pipe has it, or it comes again.
"""

from __future__ import annotations

import sys
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InvalidSetting
from ..model.names import check_group
from . import exits, show
from .frame import Run, command
from .messages import Format, Printer
from .values import Topic, seconds
from .wishes import Exhausted, Expires, Lease, MaxAttempts, MaxHold, Mode, Order, Start, wished

if TYPE_CHECKING:
    from postroom import Connection, Consumer

__all__ = ["register"]

_AT_ONCE = 500
_HELD = 1000  # without acks, all that were printed are held until the end
_LONG_S = 30.0


def register(app: typer.Typer) -> None:
    command(app, "consume", rich_help_panel="Messages")(consume)


async def consume(
    run: Run,
    topic: Topic,
    group: Annotated[str, typer.Option("--group", "-g", help="The group to take messages for.")],
    count: Annotated[int | None, typer.Option("--count", "-n", min=1, help="Stop after so many.")] = None,
    wait: Annotated[
        str | None,
        typer.Option("--wait", "-w", help='Stop when nothing came for so long, such as "5s".'),
    ] = None,
    no_ack: Annotated[
        bool, typer.Option("--no-ack", help="Hand them all back at the end, as if nothing had been taken.")
    ] = False,
    format: Format = None,
    mode: Mode = None,
    order: Order = None,
    member: Annotated[
        str | None,
        typer.Option(help="A name for this member; with --mode broadcast it goes on where it stopped."),
    ] = None,
    start: Start = None,
    lease: Lease = None,
    max_attempts: MaxAttempts = None,
    exhausted: Exhausted = None,
    max_hold: MaxHold = None,
    expires: Expires = None,
    create: Annotated[bool, typer.Option("--create", help="Make the group if it is not there.")] = False,
) -> None:
    """Take messages as a member of a group: print each, then ack it. Stops at Ctrl-C, or when told.

    Settings of the group (mode, order, start, lease …) are those it has. One that is not there is made with
    --create, and takes those named here.
    """
    check_group(group)
    printer = Printer(format, as_json=run.json)
    idle_s = None if wait is None else seconds(wait, name="--wait")
    if no_ack and (count or 0) > _HELD:
        raise InvalidSetting(f"--no-ack holds what it printed until the end: --count {_HELD} at most")
    wish = wished(
        mode=mode, order=order, member=member, start=start, lease=lease, max_attempts=max_attempts,
        exhausted=exhausted, max_hold=max_hold, expires=expires,
    )  # fmt: skip
    async with run.connect() as mq:
        new = await _is_new(run, mq, topic, group, create)
        window = min(count or _HELD, _HELD)
        async with mq.consumer(topic, group=group, window=window, **wish) as consumer:
            if new:
                await _note_new(mq, topic, group)
            await _take(consumer, printer, count or (_HELD if no_ack else None), idle_s, no_ack)
    if not run.json and printer.printed:
        exits.say_note(_summary(printer.printed, topic, group, no_ack))


async def _is_new(run: Run, mq: Connection, topic: str, group: str, create: bool) -> bool:
    """A mistyped name would make a group that holds messages for ever (R44): ask, or refuse."""
    known = [info.name for info in await mq.groups(topic)]
    if group in known:
        return False
    if create:
        return True
    shown = [name for name in known if "@" not in name]
    close = get_close_matches(group, shown, n=1)
    meant = f" Did you mean {close[0]}?" if close else ""
    there = f"it has {', '.join(shown)}" if shown else "it has none yet"
    said = f"topic {topic!r} has no group {group!r}; {there}.{meant}"
    if run.json or not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise exits.AbortedError(f"{said} Correct the name, or add --create to make it")
    _ask_to_make(said, group)
    return True


def _ask_to_make(said: str, group: str) -> None:
    typer.echo(said)
    try:
        answer = input(f"Make group {group}? Type y to do it [y/N] ")
    except EOFError:
        answer = ""
    if answer.strip().lower() not in ("y", "yes"):
        raise exits.AbortedError("nothing was changed")


async def _note_new(mq: Connection, topic: str, group: str) -> None:
    for info in await mq.groups(topic):
        if info.name == group:
            exits.say_note(info.settings.news(topic, group))


async def _take(
    consumer: Consumer, printer: Printer, count: int | None, idle_s: float | None, no_ack: bool
) -> None:
    held: list[Any] = []  # kept alive: what is dropped unsettled is settled by nobody
    while count is None or printer.printed < count:
        room = _AT_ONCE if count is None else min(_AT_ONCE, count - printer.printed)
        messages = await consumer.poll(room, wait=_LONG_S if idle_s is None else idle_s)
        if not messages:
            if idle_s is not None:
                return
            continue
        printer.print(messages)
        if no_ack:
            held += messages
        else:
            await consumer.ack(messages)


def _summary(printed: int, topic: str, group: str, no_ack: bool) -> str:
    deed = "handed back" if no_ack else "acked"
    return f"{show.messages(printed)} of {topic} printed and {deed} for group {group}"
