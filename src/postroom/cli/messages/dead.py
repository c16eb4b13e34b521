"""`postroom dead …`: list, inspect, redrive and discard a group's dead letters (R20)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...errors import CatalogError, PermissionDenied, UsageError
from ...model.delivery.reason import plain_reason
from ...model.topology.names import REDRIVE_GROUP, base_of, dead_topic
from ..framework import show
from ..framework.command import Run, command, family
from ..framework.exits import say_note
from ..framework.options import AnyGroup, AnyTopic, Group, Topic
from ..framework.show import View, answer
from ..framework.terminal import DryRun, Losses, Yes, agreed

if TYPE_CHECKING:
    from postroom import Connection, DeadLetter

__all__ = ["app", "dead_letter_count"]

app = family("dead", "List, inspect, redrive and discard dead letters.")

Ids = Annotated[
    list[str] | None,
    typer.Option("--id", help="Only the one with this id; repeatable. Default: all.", show_default=False),
]
List = Annotated[
    Path | None,
    typer.Option(
        "--from",
        metavar="FILE",
        help="Only those of a list, one JSON object with an id a line, as of `postroom pipeline triage`.",
        show_default=False,
    ),
]
_EVERY = 2**31 - 1


@command(app, "list")
async def list_letters(
    run: Run,
    topic: AnyTopic = None,
    group: AnyGroup = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="How many at most.")] = 100,
    by_error: Annotated[
        bool,
        typer.Option("--by-error", help="One line for each error, the most frequent first."),
    ] = False,
) -> None:
    """List a group's dead letters, oldest first; or what they died of; or which groups have some."""
    if topic is None or group is None:
        if by_error:
            raise UsageError("--by-error is for one group: name its topic and the group")
        async with run.connect() as mq:
            _GROUP.list(
                run, await _groups(mq, topic), none=f"no dead letters{' of ' + topic if topic else ''}"
            )
        return
    if by_error:
        async with run.connect() as mq:
            errors = _errors(await mq.dead_letters(topic, group, limit=_EVERY))
        _ERROR.list(run, errors[:limit], none=_none(topic, group))
        if len(errors) > limit and not run.json:
            typer.echo(f"… and {len(errors) - limit} errors more; --limit {limit * 10} shows them")
        return
    async with run.connect() as mq:
        letters = await mq.dead_letters(topic, group, limit=limit + 1)
    more, letters = len(letters) > limit, letters[:limit]
    _LETTER.list(run, letters, none=_none(topic, group))
    if more and not run.json:
        typer.echo(f"… and more; --limit {limit * 10} shows them")


@command(app, "show")
async def show_letters(run: Run, topic: Topic, group: Group, id: Ids = None) -> None:
    """Show dead letters in full: reason, traceback, headers, value."""
    async with run.connect() as mq:
        letters = await _chosen(mq, topic, group, id)
    _LETTER.details(run, letters, none=_none(topic, group))


@command(app, "redrive")
async def redrive(
    run: Run, topic: Topic, group: Group, id: Ids = None, file: List = None, dry_run: DryRun = False
) -> None:
    """Hand dead letters back to that group alone; they are handled again."""
    listed = None if file is None else _listed(file, topic, group)
    async with run.connect() as mq:
        if listed is not None:
            id = [*(id or ()), *await _still_there(mq, topic, group, listed)]
        if listed is not None and not id:
            moved = 0
        elif dry_run:
            moved = len(await _chosen(mq, topic, group, id))
        else:
            moved = await mq.redrive(topic, group, ids=id or None)
    verb = "would hand" if dry_run else "handed"
    fields = {"topic": topic, "group": group, "redriven": moved, "dry_run": dry_run}
    answer(run, fields, f"{verb} {show.dead_letters(moved)} back to group {group}")


@command(app, "discard")
async def discard(
    run: Run, topic: Topic, group: Group, id: Ids = None, yes: Yes = False, dry_run: DryRun = False
) -> None:
    """Throw dead letters away."""
    async with run.connect() as mq:
        doomed = len(await _chosen(mq, topic, group, id))
        losses: Losses = {"topic": topic, "group": group, "dead_letters": doomed}
        what = f"discard dead letters of group {group!r}"
        counted = f"{show.dead_letters(doomed)} will be lost"
        if not agreed(run, what, losses, yes=yes, dry_run=dry_run, counted=counted):
            return
        gone = await mq.discard_dead_letters(topic, group, ids=id or None)
    fields = {"topic": topic, "group": group, "discarded": gone}
    answer(run, fields, f"discarded {show.dead_letters(gone)} of group {group}")


@dataclass(frozen=True, slots=True)
class _DeadGroup:
    topic: str
    group: str
    letters: int
    oldest: DeadLetter


async def dead_letter_count(mq: Connection, topic: str, group: str) -> int:
    """How many dead letters a group has; 0 also where they may not be seen."""
    try:
        return (await mq.lag(dead_topic(topic, group), REDRIVE_GROUP)).total.messages
    except (CatalogError, PermissionDenied):
        return 0


async def _groups(mq: Connection, only: str | None) -> list[_DeadGroup]:
    """The groups that have dead letters, of one topic or of all, those with the most first."""
    topics = [await mq.topic(only)] if only is not None else await mq.topics()
    found = []
    for topic in topics:
        for info in await mq.groups(topic.name):
            if base_of(info.name) is None and (
                oldest := await mq.dead_letters(topic.name, info.name, limit=1)
            ):
                lag = await mq.lag(dead_topic(topic.name, info.name), REDRIVE_GROUP)
                found.append(_DeadGroup(topic.name, info.name, lag.total.messages, oldest[0]))
    return sorted(found, key=lambda one: (-one.letters, one.topic, one.group))


def _listed(file: Path, topic: str, group: str) -> set[str]:
    """The ids in a list of dead letters; UsageError with the line that is none of it."""
    found = set()
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--from {file}: cannot be read ({error})") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except ValueError:
            fields = None
        if not isinstance(fields, dict) or not isinstance(fields.get("id"), str):
            raise UsageError(f'--from {file}, line {number}: write an object such as {{"id": "o-1"}}')
        if fields.get("topic", topic) != topic or fields.get("group", group) != group:
            of = f"group {fields.get('group')!r} of topic {fields.get('topic')!r}"
            raise UsageError(f"--from {file}, line {number}: this is a dead letter of {of}; nothing was done")
        found.add(fields["id"])
    return found


async def _still_there(mq: Connection, topic: str, group: str, ids: set[str]) -> list[str]:
    """A list may be older than what was redriven since."""
    there = ids & {letter.id for letter in await mq.dead_letters(topic, group, limit=_EVERY)}
    if gone := len(ids) - len(there):
        say_note(f"{show.dead_letters(gone)} of the list {'is' if gone == 1 else 'are'} not there any more")
    return sorted(there)


async def _chosen(mq: Connection, topic: str, group: str, ids: list[str] | None) -> list[DeadLetter]:
    letters = await mq.dead_letters(topic, group, limit=_EVERY)
    if not ids:
        return letters
    if unknown := set(ids) - {letter.id for letter in letters}:
        raise UsageError(
            f"group {group!r} of topic {topic!r} has no dead letter with the id {min(unknown)!r}: "
            f"`postroom dead list {topic} {group}` lists those it has"
        )
    return [letter for letter in letters if letter.id in ids]


@dataclass(frozen=True, slots=True)
class _Error:
    """What several letters died of: their reasons differ in numbers and ids alone."""

    error: str
    letters: int
    first_ms: int
    last_ms: int
    newest: DeadLetter


def _errors(letters: list[DeadLetter]) -> list[_Error]:
    """The errors of these letters, the most frequent first."""
    alike: dict[str, list[DeadLetter]] = {}
    for letter in letters:
        alike.setdefault(plain_reason(letter.reason), []).append(letter)
    found = []
    for error, those in alike.items():
        times = [letter.dead_at for letter in those]
        newest = max(those, key=lambda letter: (letter.dead_at, letter.offset))
        found.append(_Error(error, len(those), min(times), max(times), newest))
    return sorted(found, key=lambda one: (-one.letters, one.error))


def _none(topic: str, group: str) -> str:
    return f"group {group} of topic {topic} has no dead letters"


def _fields(letter: DeadLetter) -> dict[str, Any]:
    return {
        **show.message_fields(letter),
        "reason": letter.reason,
        "attempts": letter.attempts,
        "dead_at": show.moment(letter.dead_at),
        **({"traceback": letter.traceback} if letter.traceback else {}),
    }


def _lines(letter: DeadLetter) -> list[tuple[str, str]]:
    headers = [(f"header {name}", show.text_of(value)) for name, value in letter.headers.items()]
    return [
        ("place", f"{letter.topic}, partition {letter.partition}, offset {letter.offset}"),
        ("sent", show.moment(letter.timestamp)),
        ("died", show.moment(letter.dead_at)),
        ("attempts", str(letter.attempts)),
        ("reason", letter.reason or "–"),
        *([("traceback", letter.traceback.rstrip())] if letter.traceback else []),
        ("key", show.text_of(letter.key)),
        *headers,
        ("value", show.text_of(letter.value)),
    ]


_GROUP: View[_DeadGroup] = View(
    fields=lambda one: {
        "topic": one.topic,
        "group": one.group,
        "letters": one.letters,
        "oldest": _fields(one.oldest),
    },
    columns={
        "topic": lambda one: one.topic,
        "group": lambda one: one.group,
        "letters": lambda one: show.count(one.letters),
        "oldest died": lambda one: show.moment(one.oldest.dead_at),
        "of": lambda one: one.oldest.reason or "–",
    },
    numbers=("letters",),
)
_ERROR: View[_Error] = View(
    fields=lambda one: {
        "error": one.error,
        "letters": one.letters,
        "first": show.moment(one.first_ms),
        "last": show.moment(one.last_ms),
        "newest": _fields(one.newest),
    },
    columns={
        "letters": lambda one: show.count(one.letters),
        "error": lambda one: one.error,
        "first died": lambda one: show.moment(one.first_ms),
        "last died": lambda one: show.moment(one.last_ms),
        "newest id": lambda one: one.newest.id,
    },
    numbers=("letters",),
)


_LETTER: View[DeadLetter] = View(
    fields=_fields,
    columns={
        "id": lambda letter: letter.id,
        "place": lambda letter: f"{letter.partition}:{letter.offset}",
        "attempts": lambda letter: str(letter.attempts),
        "died": lambda letter: show.moment(letter.dead_at),
        "reason": lambda letter: letter.reason or "–",
        "value": lambda letter: show.short(show.text_of(letter.value)),
    },
    numbers=("attempts",),
    title=lambda letter: f"dead letter {letter.id}",
    lines=_lines,
    named="field",
)
