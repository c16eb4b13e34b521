"""Messages on standard output, in the format the user chose.

`value` writes the bytes as they are and a newline; `full` is a line for people; `json` a line for scripts;
anything with braces is a template. What is written is flushed before a message counts as printed, so that
`consume` acks nothing the reader did not get.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InvalidSetting
from . import show

if TYPE_CHECKING:
    from postroom import Received

__all__ = ["Format", "Printer"]

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
