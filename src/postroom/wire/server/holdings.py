"""What a connected client holds, and when it is to be asked about it (R19). No socket, no clock, no loop.

Leases are renewed by heartbeats. If one is about to end all the same, its holder may still be there: it is
asked, and what it is at work on is extended, what it is done with is settled. What it does not answer for is
delivered again, as if it were gone. It is asked three seconds before the end, or in the second half of a
short lease, with three eighths of it left at least: enough for leases of a second and more. Only a hint is
kept here: whatever the store says is what counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ...endpoint.requests import Ask
from ...endpoint.values import Beat, Held, PollReply, PollRequest, Settle
from ...model.delivery.delivery import Span

__all__ = ["Holdings", "answered"]

_AT_ONCE = 500  # deliveries in one question: what is answered has a limit too


@dataclass(frozen=True, slots=True)
class _Holding:
    topic: str  # of the group
    group: str
    member: str
    held: Held
    lease_ms: int
    until_ms: int


class Holdings:
    """The deliveries that one connection holds. Times are the server's own, in milliseconds."""

    def __init__(self) -> None:
        self._holdings: dict[tuple[int, int], _Holding] = {}  # by partition and token
        self._shortest_ms = 0  # of the leases since nothing was held; 0: nothing is

    def __len__(self) -> int:
        return len(self._holdings)

    @property
    def look_ms(self) -> int:
        """How often `due` is to be asked: eight times in the shortest lease; 0 if nothing is held."""
        return self._shortest_ms // 8 if self._holdings else 0

    def _hold(self, key: tuple[int, int], holding: _Holding) -> None:
        shortest = self._shortest_ms if self._holdings else holding.lease_ms
        self._shortest_ms = min(shortest, holding.lease_ms)
        self._holdings[key] = holding

    def granted(self, request: PollRequest, reply: PollReply, now_ms: int) -> None:
        """Counted from now: the lease ends a little earlier, which `before_ms` of `due` has room for."""
        if request.on_delivery:
            return
        for grant in reply.grants:
            key = (grant.partition_id, request.token)
            before = self._holdings.get(key)
            spans = [(lease.first, lease.last) for lease in grant.leases]
            if before is not None:
                spans = sorted({*before.held.spans, *spans})
            if spans:
                held = Held(grant.topic, grant.partition_id, request.token, tuple(spans))
                until_ms = now_ms + reply.lease_ms
                lease_ms = reply.lease_ms
                self._hold(
                    key, _Holding(request.topic, request.group, request.member, held, lease_ms, until_ms)
                )

    def settled(self, parts: Iterable[Settle]) -> None:
        for part in parts:
            key = (part.partition_id, part.token)
            holding = self._holdings.get(key)
            if holding is not None:
                left = _without(holding.held.spans, _settled(part))
                if left:
                    self._holdings[key] = replace(holding, held=replace(holding.held, spans=left))
                else:
                    del self._holdings[key]

    def renewed(self, beats: Iterable[Beat], now_ms: int) -> None:
        for beat in beats:
            for held in beat.held:
                holding = self._holdings.get((held.partition_id, held.token))
                if holding is not None:
                    self._holdings[held.partition_id, held.token] = replace(
                        holding, until_ms=now_ms + holding.lease_ms
                    )

    def due(self, now_ms: int, before_ms: int) -> list[Ask]:
        """Returns what is to be asked now, and forgets it: who is at work holds it anew (`kept`)."""
        asks: dict[tuple[str, str, str, int], list[Held]] = {}
        for key, holding in list(self._holdings.items()):
            if holding.until_ms - min(before_ms, holding.lease_ms // 2) <= now_ms:
                del self._holdings[key]
                who = (holding.topic, holding.group, holding.member, holding.lease_ms)
                asks.setdefault(who, []).append(holding.held)
        return [
            Ask(a, b, c, tuple(held[at : at + _AT_ONCE]), lease_ms)
            for (a, b, c, lease_ms), held in asks.items()
            for at in range(0, len(held), _AT_ONCE)
        ]

    def kept(self, ask: Ask, working: Iterable[Held], now_ms: int) -> None:
        for held in working:
            key = (held.partition_id, held.token)
            if key not in self._holdings:
                until_ms = now_ms + ask.lease_ms
                self._hold(key, _Holding(ask.topic, ask.group, ask.member, held, ask.lease_ms, until_ms))


def answered(ask: Ask, held: Iterable[Held]) -> list[Held]:
    """Returns what a client was asked about of its answer: each delivery once, with all of its spans."""
    asked = {(one.topic, one.partition_id, one.token) for one in ask.held}
    spans: dict[tuple[str, int, int], set[Span]] = {}
    for one in held:
        key = (one.topic, one.partition_id, one.token)
        if key in asked:
            spans.setdefault(key, set()).update(one.spans)
    return [Held(*key, tuple(sorted(found))) for key, found in spans.items()]


def _settled(part: Settle) -> list[Span]:
    return [(v.first, v.last) for v in part.verdicts if v.kind != "park"]  # whose range has other keys in it


def _without(spans: Sequence[Span], gone: Iterable[Span]) -> tuple[Span, ...]:
    """In one pass over both, since clients choose how many there are."""
    left: list[Span] = []
    ended = sorted((first, last) for first, last in gone if first <= last)
    at, upto = 0, -1  # of `ended`: what is left of it begins there; and up to where the former ones go
    for a, z in sorted(spans):
        while at < len(ended) and ended[at][1] < a:
            upto = max(upto, ended[at][1])
            at += 1
        start, index = max(a, upto + 1), at
        while start <= z and index < len(ended) and ended[index][0] <= z:
            first, last = ended[index]
            if start < first:
                left.append((start, first - 1))
            start = max(start, last + 1)
            index += 1
        if start <= z:
            left.append((start, z))
    return tuple(dict.fromkeys(left))
