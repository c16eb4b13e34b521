"""`postroom send` and `postroom cancel`: one message, or each line of standard input as one.

Lines are sent in batches as they come. What was sent before a wrong line stays sent, and the error says
how many that is.
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
import os
import stat
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from ...errors import InvalidMessage, InvalidSetting, PostroomError, UsageError
from ..framework import exits, show
from ..framework.command import Run
from ..framework.options import Topic, duration, headers, moment
from ..framework.show import answer

if TYPE_CHECKING:
    from postroom import Connection, Message, Receipt

__all__ = ["cancel", "line_chunks", "send", "size_of_stdin"]


_PART = 1000  # messages sent in one call
_KNOWN = {"value", "value_base64", "key", "key_base64", "headers", "id", "delay", "at", "expires"}
_SHOWN = {"topic", "partition", "offset", "timestamp", "attempt"}  # what `read --json` adds


async def send(
    run: Run,
    topic: Topic,
    value: Annotated[
        str | None,
        typer.Argument(help="The message. - or nothing: each line of standard input.", show_default=False),
    ] = None,
    key: Annotated[str | None, typer.Option("--key", "-k", help="Equal keys keep their order.")] = None,
    header: Annotated[
        list[str] | None, typer.Option("--header", "-H", metavar="NAME=VALUE", help="A header; repeatable.")
    ] = None,
    id: Annotated[
        str | None,
        typer.Option(
            "--id", help="The message's own id; repeats are dropped if the topic has a dedup window."
        ),
    ] = None,
    delay: Annotated[
        str | None, typer.Option(help='Deliver it after so long, such as "10m".', show_default=False)
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(help="Deliver it at that moment, such as 2026-01-31T08:00:00Z.", show_default=False),
    ] = None,
    expires: Annotated[
        str | None,
        typer.Option(help='Expire after a duration ("1h"), or at a moment.'),
    ] = None,
    timeout: Annotated[
        str | None,
        typer.Option(help='Give up after so long, such as "5s". Default: 30s.', show_default=False),
    ] = None,
    jsonl: Annotated[
        bool, typer.Option("--jsonl", help='Lines are JSON: {"value": …, "key": …, "headers": {…}, "id": …}.')
    ] = False,
) -> None:
    """Send a message, or each line of standard input: `cat file | postroom send orders -`."""
    logging.getLogger("postroom.producer").addHandler(_NOTES)
    shared = _shared(key, headers(header or ()), delay, at, expires)
    patience = duration(timeout, name="--timeout") or "30s"
    if value is not None and value != "-":
        if jsonl:
            raise UsageError("--jsonl reads standard input: leave the value out")
        await _send_one(run, topic, value, shared, id, patience)
        return
    if id is not None:
        raise UsageError('--id names one message: give the value too, or use --jsonl with "id" in each line')
    if value is None and sys.stdin.isatty():
        raise UsageError(f"nothing to send: postroom send {topic} VALUE, or lines from a pipe")
    await _send_lines(run, topic, _jsonl(shared) if jsonl else _plain(shared), patience)


async def cancel(
    run: Run,
    topic: Topic,
    id: Annotated[str, typer.Argument(metavar="ID", help="The message's id.", show_default=False)],
) -> None:
    """Take back a delayed message. Exit code 1 if it is not waiting (any more)."""
    async with run.connect() as mq:
        cancelled = await mq.cancel(topic, id)
    if run.json:
        show.json_line({"topic": topic, "id": id, "cancelled": cancelled})
    elif cancelled:
        typer.echo(f"cancelled message {id} of topic {topic}")
    if not cancelled:
        said = f"no delayed message {id!r} waits in topic {topic!r}"
        why = "it was delivered or cancelled before, or never sent"
        exits.say_error("not_waiting", f"{said}: {why}", as_json=run.json)
        raise typer.Exit(exits.FAILED)


class _Notes(logging.Handler):
    """A handler that shows the producer's warnings as notes."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            exits.say_note(exits.worded(record.getMessage()))


_NOTES = _Notes()

Shared: TypeAlias = dict[str, Any]
"""What every message of one call has, unless a line says otherwise: fields of `postroom.Message`."""


def _shared(
    key: str | None, named: dict[str, str] | None, delay: str | None, at: str | None, expires: str | None
) -> Shared:
    if delay is not None and at is not None:
        raise UsageError("--delay and --at both say when: leave one of them out")
    return {
        "key": key,
        "headers": named,
        "delay": duration(delay, name="--delay"),
        "at": None if at is None else moment(at, name="--at"),
        "expires": None if expires is None else _expiry(expires, "--expires"),
    }


def _expiry(text: str, name: str) -> str | datetime:
    """A duration, or a moment: the latter has a date in it."""
    return moment(text, name=name) if text.count("-") >= 2 else duration(text, name=name) or ""


async def _send_one(run: Run, topic: str, value: str, shared: Shared, id: str | None, timeout: str) -> None:
    data = value.encode(errors="surrogateescape")  # the very bytes of the command line
    async with run.connect() as mq:
        receipt = await mq.send(topic, data, id=id, timeout=timeout, **shared)
    names = ("topic", "partition", "offset", "id", "duplicate")
    due = None if receipt.due is None else show.moment(round(receipt.due.timestamp() * 1000))
    answer(run, {**{name: getattr(receipt, name) for name in names}, "due": due}, _sent(receipt))


def _sent(receipt: Receipt) -> str:
    if receipt.duplicate:
        return f"dropped: topic {receipt.topic} has a message with the id {receipt.id} already"
    if receipt.due is not None:
        when = show.moment(round(receipt.due.timestamp() * 1000))
        back = f"`postroom cancel {receipt.topic} {receipt.id}` takes it back"
        return f"sent to {receipt.topic}, due {when}; {back}"
    return f"sent to {receipt.topic}, partition {receipt.partition}, offset {receipt.offset}"


# ---- lines ----

Reading = Callable[[bytes], "Message | None"]


def _plain(shared: Shared) -> Reading:
    from postroom import Message

    return lambda line: Message(line, **shared)


def _jsonl(shared: Shared) -> Reading:
    from postroom import Message

    def read(line: bytes) -> Message | None:
        if not line.strip():
            return None
        found = _object(line)
        value = _content(found, "value")
        if value is None:
            raise InvalidMessage('"value" is missing')
        return Message(value, id=found.get("id"), **_fields(found, shared))

    return read


def _fields(found: Mapping[str, Any], shared: Shared) -> Shared:
    """Return the fields of a message: what the line says goes before what the call says."""
    own = {name: found[name] for name in ("delay", "at", "expires") if found.get(name) is not None}
    headers = found.get("headers") or {}
    if not isinstance(headers, dict):
        raise InvalidMessage('"headers" must be an object, such as {"source": "web"}')
    key = _content(found, "key")
    fields = {**shared, "headers": {**(shared["headers"] or {}), **headers} or None}
    if key is not None:
        fields["key"] = key
    if "delay" in own or "at" in own:
        fields |= {"delay": None, "at": None}
    if isinstance(own.get("expires"), str):
        own["expires"] = _expiry(own["expires"], '"expires"')
    return fields | own


def _object(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise InvalidMessage(f"this is no JSON ({error})") from None
    if not isinstance(found, dict):
        raise InvalidMessage('each line must be an object, such as {"value": "…"}')
    if strange := found.keys() - _KNOWN - _SHOWN:
        raise InvalidMessage(f"unknown field {min(strange)!r}; there are {', '.join(sorted(_KNOWN))}")
    return found


def _content(found: Mapping[str, Any], name: str) -> bytes | None:
    if (packed := found.get(f"{name}_base64")) is not None:
        try:
            return base64.b64decode(packed, validate=True)
        except (binascii.Error, TypeError, ValueError):
            raise InvalidMessage(f'"{name}_base64" is not base64') from None
    content = found.get(name)
    if content is None or isinstance(content, str):
        return None if content is None else content.encode()
    return show.encoded(content).encode()  # any other JSON value goes as JSON


async def _send_lines(run: Run, topic: str, read: Reading, timeout: str) -> None:
    started, sent, line_number = time.perf_counter(), 0, 0
    async with run.connect() as mq:
        await mq.groups(topic)  # an unknown topic is an error even when no line comes
        with _progress(run, size_of_stdin()) as advance:
            async for lines in line_chunks():
                messages = _messages(lines, read, line_number, sent)
                await _send_chunk(mq, topic, messages, line_number, sent, timeout)
                sent += len(messages)
                line_number += len(lines)
                advance(len(messages), sum(map(len, lines)) + len(lines))
    _say_sent(run, topic, sent, time.perf_counter() - started)


def _messages(lines: list[bytes], read: Reading, before: int, sent: int) -> list[Message]:
    found = []
    for at, line in enumerate(lines):
        try:
            message = read(line)
        except (InvalidMessage, InvalidSetting) as error:
            raise _at_line(error, before + at + 1, sent) from None
        if message is not None:
            found.append(message)
    return found


async def _send_chunk(
    mq: Connection, topic: str, messages: list[Message], before: int, sent: int, timeout: str
) -> None:
    """Send in parts, all at once: messages without a key go round the partitions, a part each (R22)."""
    import asyncio

    parts = [messages[at : at + _PART] for at in range(0, len(messages), _PART)]
    sending = [mq.send_many(topic, part, timeout=timeout) for part in parts]
    outcomes = await asyncio.gather(*sending, return_exceptions=True)
    sent += sum(len(outcome) for outcome in outcomes if isinstance(outcome, list))
    for at, outcome in enumerate(outcomes):
        if isinstance(outcome, UsageError) and "index" in outcome.details:
            raise _at_line(outcome, before + at * _PART + outcome.details["index"] + 1, sent)
        if isinstance(outcome, BaseException):
            raise outcome


def _at_line(error: PostroomError, line: int, sent: int) -> PostroomError:
    kept = f"; {show.messages(sent, 'was', 'were')} sent" if sent else "; nothing was sent"
    reason = str(error).partition("]: ")[2] or str(error)
    return type(error)(f"line {line}: {reason}{kept}", line=line, sent=sent)


def _say_sent(run: Run, topic: str, sent: int, seconds: float) -> None:
    per_s = sent / seconds if seconds else 0.0
    fields = {"topic": topic, "sent": sent, "seconds": round(seconds, 3), "per_s": round(per_s)}
    answer(run, fields, f"sent {show.messages(sent)} to {topic} in {seconds:.2f} s ({show.rate(per_s)})")


def _progress(run: Run, size: int | None) -> AbstractContextManager[Callable[[int, int], None]]:
    if run.json or not (sys.stdout.isatty() and sys.stderr.isatty()):
        return nullcontext(lambda messages, size: None)
    from ..framework.terminal import sending

    return sending(size)


# ---- standard input ----
# A thread of its own reads what is there and hands it over in chunks; the queue between is bounded, so a
# fast writer waits. It reads the file descriptor itself: a thread that waits inside `sys.stdin` would
# hold its lock when the program ends.

_CHUNK_BYTES = 1024 * 1024
_QUEUED_CHUNKS = 2


async def line_chunks() -> AsyncIterator[list[bytes]]:
    """Yield lists of whole lines without their newline; the last line may lack it."""
    rest = b""
    async for data in _chunks():
        *lines, rest = (rest + data).split(b"\n")
        if lines:
            yield lines
    if rest:
        yield [rest]


async def _chunks() -> AsyncIterator[bytes]:
    import asyncio

    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[bytes | OSError] = asyncio.Queue()
    room = threading.Semaphore(_QUEUED_CHUNKS)

    def read_all() -> None:
        data: bytes | OSError = b"?"
        while data and not isinstance(data, OSError):
            try:
                data = _read()
            except OSError as error:
                data = error
            room.acquire()
            try:
                loop.call_soon_threadsafe(queue.put_nowait, data)
            except RuntimeError:  # the loop is closed: nobody wants more
                return

    threading.Thread(target=read_all, name="postroom-stdin", daemon=True).start()
    while data := await queue.get():
        room.release()
        if isinstance(data, OSError):
            raise data
        yield data


def _read() -> bytes:
    try:
        descriptor = sys.stdin.fileno()
    except (OSError, ValueError):  # replaced by a test, or closed
        return sys.stdin.buffer.read(_CHUNK_BYTES)
    return os.read(descriptor, _CHUNK_BYTES)


def size_of_stdin() -> int | None:
    """Return how many bytes are to come; None if standard input is no file."""
    try:
        found = os.fstat(sys.stdin.fileno())
    except (OSError, ValueError):
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None
