"""`postroom delayed …`: list messages that are not due yet, and take some back (R35).

What waits is of two kinds, and the list says which: a message that was sent with a delay, for all groups of
its topic; and a retry that is so far away that it left its group for the group's own topic (`for`: that group
alone). A retry that is near stays in its group, and `postroom lag` counts it as unsettled.
"""

from __future__ import annotations

import heapq
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...model.topology.names import owner
from ...units import format_bytes, format_duration
from ..framework import exits, show
from ..framework.command import Run, command, family
from ..framework.options import AnyTopic, Topic
from ..framework.show import View

if TYPE_CHECKING:
    from postroom import Connection, Delayed

__all__ = ["app"]

app = family("delayed", "List messages that are not due yet, and take some back.")


@command(app, "list")
async def list_delayed(
    run: Run,
    topic: AnyTopic = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="How many at most.")] = 100,
    after: Annotated[
        str | None,
        typer.Option(
            help="Go on behind this one: the `cursor` of the last, as --json shows it.", show_default=False
        ),
    ] = None,
) -> None:
    """List what is due later, the soonest first: messages sent with a delay, and retries far away."""
    async with run.connect() as mq:
        if after is not None and topic is not None:
            found = await mq.delayed(topic, limit=limit + 1, after=after)
        elif after is not None:
            raise typer.BadParameter("name the topic of that cursor as well", param_hint="--after")
        else:
            found = await _soonest(mq, topic, limit + 1)
    more, found = len(found) > limit, found[:limit]
    if run.json:
        show.json_line([_fields(one) for one in found])
        return
    where = "" if topic is None else f" in topic {topic}"
    _view(round(time.time() * 1000)).list(run, found, none=f"no delayed messages wait{where}")
    if more:
        typer.echo(f"… and more; --limit {limit * 10} shows them")


async def _soonest(mq: Connection, topic: str | None, limit: int) -> list[Delayed]:
    """Return what is due first, in these topics together: the topic's own, and its groups' far retries."""
    if topic is not None:
        await mq.topic(topic)  # raises, with a suggestion, if there is none
    delayed = [info.name for info in await mq.topics(internal=True) if info.delayed]
    wanted = [name for name in delayed if topic in (None, name, (owner(name) or ("",))[0])]
    lists = [await mq.delayed(name, limit=limit) for name in wanted]
    return list(heapq.merge(*lists, key=lambda one: one.due_ms))[:limit]


@command(app, "cancel")
async def cancel_delayed(
    run: Run,
    topic: Topic,
    ids: Annotated[list[str], typer.Argument(metavar="ID…", help="The messages' ids.", show_default=False)],
) -> None:
    """Take back delayed messages. Exit code 1 if one of them is not waiting (any more)."""
    async with run.connect() as mq:
        done = {id: await mq.cancel(topic, id) for id in dict.fromkeys(ids)}
    if run.json:
        show.json_line([{"topic": topic, "id": id, "cancelled": cancelled} for id, cancelled in done.items()])
    for id in [id for id, cancelled in done.items() if cancelled and not run.json]:
        typer.echo(f"cancelled message {id} of topic {topic}")
    if missing := [id for id, cancelled in done.items() if not cancelled]:
        said = f"no delayed message {', '.join(map(repr, missing))} waits in topic {topic!r}"
        why = (
            f"delivered or cancelled before, or never sent; `postroom delayed list {topic}` shows what waits"
        )
        exits.say_error("not_waiting", f"{said}: {why}", as_json=run.json)
        raise typer.Exit(exits.FAILED)


# ---- how it looks ----


def _for(one: Delayed) -> str:
    """Say who gets it: every group of the topic, or the group whose retry it is."""
    found = owner(one.topic)
    return "every group" if found is None else f"{found[1]} (retry)"


def _fields(one: Delayed) -> dict[str, Any]:
    whose = owner(one.topic)
    return {
        "topic": one.topic,
        **show.content_fields(one),
        "due": show.moment(one.due_ms),
        "bytes": one.size,
        "retry_of": None if whose is None else whose[1],
        "cursor": one.cursor,
    }


def _view(now_ms: int) -> View[Delayed]:
    """Return how they are shown at that moment."""

    def left(one: Delayed) -> str:
        return "overdue" if one.due_ms <= now_ms else format_duration(one.due_ms - now_ms)

    return View(
        fields=_fields,
        columns={
            "due": lambda one: show.moment(one.due_ms),
            "in": left,
            "topic": lambda one: one.topic,
            "id": lambda one: one.id,
            "key": lambda one: show.short(show.text_of(one.key), 30),
            "for": _for,
            "size": lambda one: format_bytes(one.size),
            "value": lambda one: show.short(show.text_of(one.value), 40),
        },
        numbers=("in", "size"),
    )
