"""`postroom rate …`: limits in messages and bytes a second on topics, groups and producers (R40)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...errors import InvalidSetting
from ...units import format_bytes, format_duration
from ..framework import show
from ..framework.command import Run, command, family
from ..framework.show import View, answer

if TYPE_CHECKING:
    from postroom import RateInfo

__all__ = ["app"]

app = family("rate", "Limit what topics, groups and producers take in a second.")

Topic = Annotated[str | None, typer.Argument(metavar="[TOPIC]", help="The topic.", show_default=False)]
Group = Annotated[
    str | None,
    typer.Argument(metavar="[GROUP]", help="A group of it, instead of the topic.", show_default=False),
]
Producer = Annotated[
    str | None,
    typer.Option(
        "--producer",
        metavar="NAME",
        help="A producer, instead of a topic: its client_id, or its principal.",
        show_default=False,
    ),
]


@command(app, "list")
async def list_rates(run: Run) -> None:
    """List the limits, and the wait that each imposes now."""
    async with run.connect() as mq:
        found = await mq.rates()
    _RATE.list(run, found)


@command(app, "set")
async def set_rate(
    run: Run,
    topic: Topic = None,
    group: Group = None,
    producer: Producer = None,
    messages: Annotated[
        str | None,
        typer.Option(
            "--messages", metavar="N", help="Messages a second, such as 1000 or 0.5.", show_default=False
        ),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option("--bytes", metavar="SIZE", help="Bytes a second, such as 10MB.", show_default=False),
    ] = None,
) -> None:
    """Limit a topic, a group or a producer, live: senders are slowed, never refused."""
    if messages is None and size is None:
        raise InvalidSetting(
            "how much? give --messages, --bytes or both; `postroom rate clear` removes a limit"
        )
    async with run.connect() as mq:
        await mq.limit_rate(
            topic=topic, group=group, producer=producer, messages_per_s=_number(messages), bytes_per_s=size
        )
        found = await mq.rates()
    info = next((info for info in found if _is(info, topic, group, producer)), None)
    if info is None:  # both are 0
        _say_cleared(run, topic, group, producer)
    else:
        answer(run, _fields(info), f"{_subject(info)}: at most {_limits(info)}, for all together")


@command(app, "clear")
async def clear(run: Run, topic: Topic = None, group: Group = None, producer: Producer = None) -> None:
    """Remove a limit; what waits for it goes on at once."""
    async with run.connect() as mq:
        await mq.limit_rate(topic=topic, group=group, producer=producer)
    _say_cleared(run, topic, group, producer)


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        raise InvalidSetting(f"--messages {text!r}: a number a second, such as 1000 or 0.5") from None


def _is(info: RateInfo, topic: str | None, group: str | None, producer: str | None) -> bool:
    return (info.topic, info.group, info.producer) == (topic or "", group or "", producer or "")


def _say_cleared(run: Run, topic: str | None, group: str | None, producer: str | None) -> None:
    what = f"group {group} of topic {topic}" if group else f"topic {topic}"
    fields = {"topic": topic, "group": group, "producer": producer, "limited": False}
    answer(run, fields, f"{f'producer {producer}' if producer else what} has no limit")


def _subject(info: RateInfo) -> str:
    if info.kind == "group":
        return f"group {info.group} of topic {info.topic}"
    return f"{info.kind} {info.producer or info.topic}"


def _limits(info: RateInfo) -> str:
    parts = [f"{_messages(info)} messages"] if info.messages_per_s else []
    parts += [_bytes(info)] if info.bytes_per_s else []
    return " and ".join(parts) + " a second"


def _messages(info: RateInfo) -> str:
    if not info.messages_per_s:
        return "–"
    return (
        show.count(int(info.messages_per_s))
        if info.messages_per_s == int(info.messages_per_s)
        else f"{info.messages_per_s:g}"
    )


def _bytes(info: RateInfo) -> str:
    return format_bytes(info.bytes_per_s) if info.bytes_per_s else "–"


def _fields(info: RateInfo) -> dict[str, Any]:
    return {
        "kind": info.kind,
        "topic": info.topic or None,
        "group": info.group or None,
        "producer": info.producer or None,
        "messages_per_s": info.messages_per_s or None,
        "bytes_per_s": info.bytes_per_s or None,
        "debt_ms": info.debt_ms,
    }


_RATE: View[RateInfo] = View(
    fields=_fields,
    columns={
        "limit on": _subject,
        "messages/s": _messages,
        "bytes/s": _bytes,
        "wait now": lambda info: format_duration(info.debt_ms) if info.debt_ms else "–",
    },
    numbers=("messages/s", "bytes/s", "wait now"),
)
