"""The judgement of a storm: by what everybody noted, and by what is stored and among the dead letters."""

from __future__ import annotations

from collections import Counter

import postroom
from postroom.testing import check
from postroom.testing.check import Event
from tests.chaos.crew import Crew
from tests.chaos.values import parse

from .report import Judged

__all__ = ["judged"]

_LAZY_NS = 5_000_000_000  # before a crash, so long ago acks may not have been flushed
_MOST_LETTERS = 1_000_000


async def judged(
    mq: postroom.Connection, crew: Crew, topic: str, groups: dict[str, bool], lease_s: float
) -> list[Judged]:
    """Return a verdict for the topic, and one for each of its groups, by name: whether it is ordered."""
    stored = [message.value.decode() async for message in mq.read(topic)]
    sent = [event for event in crew.history(topic, "-") if event.did in ("sending", "confirmed")]
    found = [Event(2**62 + at, "stored", id=value) for at, value in enumerate(stored)]
    verdicts = [_judged(topic, check.log([*sent, *found], ordered=False))]
    for group, ordered in groups.items():
        letters = await mq.dead_letters(topic, group, limit=_MOST_LETTERS)
        ends = _ends(stored, [letter.value.decode() for letter in letters])
        verdict = check.group(
            [*map(_due, crew.history(topic, group)), *ends],
            ordered=ordered,
            lease_ns=int(lease_s * 1.5e9),
            lazy_ns=_LAZY_NS,
            dead_letters=True,
        )
        verdicts.append(_judged(f"{topic}/{group}", verdict))
    return verdicts


def _due(event: Event) -> Event:
    """With the moment before which it must not be handled."""
    if event.did != "sending":
        return event
    return Event(event.at, event.did, event.by, event.id, event.key, due=parse(event.id).due_ms * 1_000_000)


def _ends(stored: list[str], letters: list[str]) -> list[Event]:
    condemned = {value for value in stored if parse(value).fate == "dead"}
    return [
        *(Event(2**62, "condemned", id=value) for value in sorted(condemned)),
        *(Event(2**62, "dead", id=value) for value in letters),
    ]


def _judged(name: str, verdict: check.Verdict) -> Judged:
    return Judged(
        name,
        verdict.confirmed,
        verdict.handled,
        dict(Counter(fault.kind for fault in verdict.faults)),
        [str(fault) for fault in verdict.faults[:5]],
        dict(verdict.excused),
    )
