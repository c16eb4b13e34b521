"""`postroom consume`: take messages as a member of a group, print them, ack them.

A message is acked only after it was written and flushed: whoever reads the pipe has it, or it comes again.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...config import DEFAULTS
from ...errors import InvalidSetting, UsageError
from ...model.topology.names import check_group
from ..framework import exits, names, show
from ..framework.command import Run
from ..framework.options import (
    Exhausted,
    Expires,
    Lease,
    MaxAttempts,
    MaxHold,
    Mode,
    Order,
    Start,
    Topic,
    place,
    seconds,
    wished,
)

if TYPE_CHECKING:
    from postroom import Connection, Consumer, Received

__all__ = ["Format", "Printer", "consume", "read"]


# ---- messages on standard output, in the format the user chose ----
# `value` writes the bytes as they are and a newline; `full` is a line for people; `json` a line for
# scripts; anything with braces is a template. What is written is flushed before a message counts as
# printed, so that `consume` acks nothing the reader did not get.

Format = Annotated[
    str | None,
    typer.Option(
        "--format",
        "-f",
        metavar="FORMAT",
        help="value, full, json, or a template such as '{partition}:{offset} {key} {value}'. "
        "Default: full on a terminal, value in a pipe.",
        show_default=False,
    ),
]

_FIELDS = ("topic", "partition", "offset", "id", "key", "value", "headers", "timestamp", "attempt")


class Printer:
    def __init__(self, chosen: str | None, *, as_json: bool) -> None:
        name = "json" if as_json else chosen or ("full" if sys.stdout.isatty() else "value")
        self._line: Callable[[Received], bytes] = _writer(name)
        self.printed = 0

    def print(self, messages: list[Received]) -> None:
        """Write them all, and make sure that they are out."""
        sys.stdout.buffer.write(b"".join(map(self._line, messages)))
        sys.stdout.buffer.flush()
        self.printed += len(messages)


def _writer(name: str) -> Callable[[Received], bytes]:
    presets: dict[str, Callable[[Received], bytes]] = {
        "value": lambda message: message.value + b"\n",
        "json": _json,
        "full": _full_plain if not sys.stdout.isatty() else _full_coloured,
    }
    if name in presets:
        return presets[name]
    if "{" not in name:
        raise InvalidSetting(
            f"--format {name!r}: use value, full, json, or a template such as '{{offset}} {{value}}'"
        )
    _check_template(name)
    return lambda message: (name.format(**_texts(message)) + "\n").encode(errors="replace")


def _check_template(template: str) -> None:
    try:
        template.format(**dict.fromkeys(_FIELDS, ""))
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        fields = ", ".join(f"{{{name}}}" for name in _FIELDS)
        raise InvalidSetting(f"--format {template!r} ({error}): the fields are {fields}") from None


def _texts(message: Received) -> dict[str, Any]:
    return {
        "topic": message.topic,
        "partition": message.partition,
        "offset": message.offset,
        "id": message.id,
        "key": show.text_of(message.key),
        "value": show.text_of(message.value),
        "headers": _headers(message),
        "timestamp": show.moment(message.timestamp),
        "attempt": message.attempt,
    }


def _headers(message: Received) -> str:
    return " ".join(f"{name}={show.text_of(value)}" for name, value in message.headers.items())


def _json(message: Received) -> bytes:
    fields = show.message_fields(message)
    if message.attempt:
        fields["attempt"] = message.attempt
    return (show.encoded(fields) + "\n").encode()


def _full(message: Received) -> tuple[str, str, str]:
    where = f"{message.partition}:{message.offset} {show.moment(message.timestamp)}"
    extras = [f"key={show.text_of(message.key)}"] if message.key is not None else []
    if message.headers:
        extras.append(_headers(message))
    if message.attempt > 1:
        extras.append(f"attempt={message.attempt}")
    return where, " ".join(extras), show.text_of(message.value)


def _full_plain(message: Received) -> bytes:
    return ("  ".join(part for part in _full(message) if part) + "\n").encode(errors="replace")


def _full_coloured(message: Received) -> bytes:
    where, extras, value = _full(message)
    middle = f"  \x1b[36m{extras}\x1b[0m" if extras else ""
    return f"\x1b[2m{where}\x1b[0m{middle}  {value}\n".encode(errors="replace")


# ---- `postroom consume` ----

_AT_ONCE = 500
_HELD = 1000  # without acks, all that were printed are held until the end


async def consume(
    run: Run,
    topic: Topic,
    group: Annotated[
        str,
        typer.Option("--group", "-g", help="The group to take messages for.", autocompletion=names.groups),
    ],
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
    wait_s = DEFAULTS.tuning.cli.consume_poll_s if idle_s is None else idle_s
    while count is None or printer.printed < count:
        room = _AT_ONCE if count is None else min(_AT_ONCE, count - printer.printed)
        messages = await consumer.poll(room, wait=wait_s)
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


# ---- `postroom read`: browse a topic without a group; nothing is acked, nothing changes ----


async def read(
    run: Run,
    topic: Topic,
    start: Annotated[
        str | None,
        typer.Option(
            help="Where to begin: earliest, latest, 2026-01-31T08:00:00Z, offsets 0=12,1=40, or, with "
            "--partition, an offset. Default: earliest; with --follow, latest.",
            show_default=False,
        ),
    ] = None,
    end: Annotated[
        str | None, typer.Option(help="Where to stop, written like --start. Default: what is there now.")
    ] = None,
    partition: Annotated[int | None, typer.Option("--partition", "-p", help="Only this partition.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", "-n", min=1, help="Stop after so many.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-F", help="Go on as messages arrive.")] = False,
    format: Format = None,
) -> None:
    """Browse a topic: no group, no ack, nothing changes."""
    if follow and end is not None:
        raise UsageError("--follow has no --end: leave one of them out")
    printer = Printer(format, as_json=run.json)
    first = place(start or ("latest" if follow else "earliest"), name="--start", partition=partition)
    last = None if end is None else place(end, name="--end", partition=partition)
    async with run.connect() as mq:
        messages = mq.read(topic, start=first, end=last, partition=partition, follow=follow)
        async with aclosing(messages):
            await _print(messages, printer, limit, at_once=1 if follow else _AT_ONCE)


async def _print(
    messages: AsyncIterator[Received], printer: Printer, limit: int | None, at_once: int
) -> None:
    waiting: list[Received] = []
    async for message in messages:
        waiting.append(message)
        enough = limit is not None and printer.printed + len(waiting) >= limit
        if enough or len(waiting) >= at_once:
            printer.print(waiting)
            waiting = []
        if enough:
            return
    printer.print(waiting)
