"""`penstock send`: one message, or each line of standard input as one.

Lines are sent in batches as they come. What was sent before a wrong line stays sent, and the error says
how many that is.
"""

from __future__ import annotations

import base64
import binascii
import json
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InvalidMessage, PenstockError, UsageError
from . import show
from .frame import Run, command
from .values import Topic, headers

if TYPE_CHECKING:
    from penstock import Connection, Message

__all__ = ["register"]

_PART = 1000  # messages sent in one call
_KNOWN = {"value", "value_base64", "key", "key_base64", "headers", "id"}
_SHOWN = {"topic", "partition", "offset", "timestamp", "attempt"}  # what `read --json` adds


def register(app: typer.Typer) -> None:
    command(app, "send", rich_help_panel="Messages")(send)


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
    id: Annotated[str | None, typer.Option("--id", help="The message's own id.")] = None,
    jsonl: Annotated[
        bool, typer.Option("--jsonl", help='Lines are JSON: {"value": …, "key": …, "headers": {…}, "id": …}.')
    ] = False,
) -> None:
    """Send a message, or each line of standard input: `cat file | penstock send orders -`."""
    named = headers(header or ())
    if value is not None and value != "-":
        if jsonl:
            raise UsageError("--jsonl reads standard input: leave the value out")
        await _send_one(run, topic, value, key, named, id)
        return
    if id is not None:
        raise UsageError('--id names one message: give the value too, or use --jsonl with "id" in each line')
    if value is None and sys.stdin.isatty():
        raise UsageError(f"nothing to send: penstock send {topic} VALUE, or lines from a pipe")
    await _send_lines(run, topic, _jsonl(key, named) if jsonl else _plain(key, named))


async def _send_one(
    run: Run, topic: str, value: str, key: str | None, named: dict[str, str] | None, id: str | None
) -> None:
    data = value.encode(errors="surrogateescape")  # the very bytes of the command line
    async with run.connect() as mq:
        receipt = await mq.send(topic, data, key=key, headers=named, id=id)
    if run.json:
        names = ("topic", "partition", "offset", "id", "duplicate")
        show.json_line({name: getattr(receipt, name) for name in names})
    else:
        typer.echo(f"sent to {topic}, partition {receipt.partition}, offset {receipt.offset}")


# ---- lines ----

Reading = Callable[[bytes], "Message | None"]


def _plain(key: str | None, named: dict[str, str] | None) -> Reading:
    from penstock import Message

    return lambda line: Message(line, key, named)


def _jsonl(key: str | None, named: Mapping[str, str] | None) -> Reading:
    from penstock import Message

    def read(line: bytes) -> Message | None:
        if not line.strip():
            return None
        found = _object(line)
        value, own_key = _content(found, "value"), _content(found, "key")
        if value is None:
            raise InvalidMessage('"value" is missing')
        own_headers = found.get("headers") or {}
        if not isinstance(own_headers, dict):
            raise InvalidMessage('"headers" must be an object, such as {"source": "web"}')
        both = {**(named or {}), **own_headers}
        return Message(value, own_key if own_key is not None else key, both or None, found.get("id"))

    return read


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


async def _send_lines(run: Run, topic: str, read: Reading) -> None:
    from .stdin import line_chunks, size_of_stdin

    started, sent, line_number = time.perf_counter(), 0, 0
    async with run.connect() as mq:
        await mq.groups(topic)  # an unknown topic is an error even when no line comes
        with _progress(run, size_of_stdin()) as advance:
            async for lines in line_chunks():
                messages = _messages(lines, read, line_number, sent)
                await _send_chunk(mq, topic, messages, line_number, sent)
                sent += len(messages)
                line_number += len(lines)
                advance(len(messages), sum(map(len, lines)) + len(lines))
    _say_sent(run, topic, sent, time.perf_counter() - started)


def _messages(lines: list[bytes], read: Reading, before: int, sent: int) -> list[Message]:
    found = []
    for at, line in enumerate(lines):
        try:
            message = read(line)
        except InvalidMessage as error:
            raise _at_line(error, before + at + 1, sent) from None
        if message is not None:
            found.append(message)
    return found


async def _send_chunk(mq: Connection, topic: str, messages: list[Message], before: int, sent: int) -> None:
    """In parts, all at once: messages without a key go from partition to partition, a part each (R22)."""
    import asyncio

    parts = [messages[at : at + _PART] for at in range(0, len(messages), _PART)]
    sending = [mq.send_many(topic, part) for part in parts]
    outcomes = await asyncio.gather(*sending, return_exceptions=True)
    sent += sum(len(outcome) for outcome in outcomes if isinstance(outcome, list))
    for at, outcome in enumerate(outcomes):
        if isinstance(outcome, UsageError) and "index" in outcome.details:
            raise _at_line(outcome, before + at * _PART + outcome.details["index"] + 1, sent)
        if isinstance(outcome, BaseException):
            raise outcome


def _at_line(error: PenstockError, line: int, sent: int) -> PenstockError:
    kept = f"; {show.messages(sent, 'was', 'were')} sent" if sent else "; nothing was sent"
    reason = str(error).partition("]: ")[2] or str(error)
    return type(error)(f"line {line}: {reason}{kept}", line=line, sent=sent)


def _say_sent(run: Run, topic: str, sent: int, seconds: float) -> None:
    per_s = sent / seconds if seconds else 0.0
    if run.json:
        show.json_line({"topic": topic, "sent": sent, "seconds": round(seconds, 3), "per_s": round(per_s)})
    else:
        typer.echo(f"sent {show.messages(sent)} to {topic} in {seconds:.2f} s ({show.rate(per_s)})")


def _progress(run: Run, size: int | None) -> AbstractContextManager[Callable[[int, int], None]]:
    if run.json or not (sys.stdout.isatty() and sys.stderr.isatty()):
        return nullcontext(lambda messages, size: None)
    from .progress import sending

    return sending(size)
