"""What members of a broadcast group did not get, judged by what they noted (R11).

Whoever was told that it missed messages may have missed those before. With a name that holds across restarts,
without one for as long as the member lives.
"""

from __future__ import annotations

from collections.abc import Sequence

from .crew import Crew
from .journal import Entry

__all__ = ["missed"]


def missed(crew: Crew, topic: str) -> dict[str, list[str]]:
    """By member, confirmed messages that it neither handled nor was told of."""
    notes = [entry for entries in crew.journals(f"producer-{topic}-*").values() for entry in entries]
    sent = {entry.value: entry.at for entry in notes if entry.verb == "sending"}
    confirmed = {entry.value: sent[entry.value] for entry in notes if entry.verb == "confirmed"}
    lives = {title: entries for title, entries in crew.lives("member").items() if entries}
    found = {title: _missing(confirmed, entries) for title, entries in lives.items()}
    return {title: values for title, values in found.items() if values}


def _missing(confirmed: dict[str, int], entries: Sequence[Entry]) -> list[str]:
    ready = min((entry.at for entry in entries if entry.verb == "ready"), default=None)
    told = max((entry.at for entry in entries if entry.verb == "missed"), default=0)
    handled = {entry.value for entry in entries if entry.verb == "handled"}
    if ready is None:
        return []
    return [value for value, at in confirmed.items() if at > max(ready, told) and value not in handled]
