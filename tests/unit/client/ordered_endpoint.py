"""An ordered group on the endpoint in memory: naive, one dictionary entry per message, with faults on demand.

Written without `model.ordered`, from what the endpoint promises: a partition has one holder, which is sent
everything unsettled that it does not say it has, in order, each with attempt and not-before, then new ones.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from postroom.endpoint.values import (
    Beat,
    Grant,
    Held,
    Lease,
    PollReply,
    PollRequest,
    Settle,
    SettleReply,
    UnparkRequest,
)
from postroom.model.delivery.delivery import Line, Span
from postroom.model.messages.batch import records
from tests.unit.client.client_endpoint import FakeEndpoint

STOPPED = 2**62


@dataclass
class Unsettled:
    attempt: int = 1
    not_before: int = 0
    received: bool = True
    alone: bool = False


@dataclass
class Kept:
    """A partition's progress."""

    cursor: int = 0
    token: int = 0
    member: str = ""
    until: int = 0
    unsettled: dict[int, Unsettled] = field(default_factory=dict)
    parked: dict[int, Line] = field(default_factory=dict)  # offset → the line it is in


class OrderedEndpoint(FakeEndpoint):
    def __init__(self, *args: object, **settings: object) -> None:
        super().__init__(*args, **settings)  # type: ignore[arg-type]
        self.kept: dict[int, Kept] = defaultdict(Kept)
        self.allowed: dict[str, set[int]] = {}  # by member, what it may hold; others may hold everything
        self.dead: list[int] = []
        self.handed_over: list[int] = []
        self.gave_up = asyncio.Event()  # a partition was handed over
        self.recalled: set[int] = set()
        self.draining = False

    # ---- polling ----

    async def poll(self, request: PollRequest) -> PollReply:
        self.calls.append(("poll", request))
        self.polled.set()
        await self._fault(self.on, "poll")
        while True:
            reply = self._reply(request)
            if reply.grants or reply.lost or reply.revoked or reply.draining or not request.wait_ms:
                break
            if not await self._heard(request.wait_ms):
                break
        await self._fault(self.after, "poll")
        return reply

    async def _heard(self, wait_ms: int) -> bool:
        """Whether there are news in time; only short waits end by themselves."""
        self.news.clear()
        try:
            async with asyncio.timeout(wait_ms / 1000 if wait_ms <= 100 else None):
                await self.news.wait()
        except TimeoutError:
            return False
        return True

    def _reply(self, request: PollRequest) -> PollReply:
        positions = dict(request.positions)
        mine = {pid for pid, kept in self.kept.items() if kept.token == request.token}
        may = self.allowed.get(request.member, set(self.partitions))
        lost = tuple(pid for pid in positions if pid not in mine)
        revoked = tuple(sorted((mine - may | mine & self.recalled) - set(request.giving_up)))
        grants: list[Grant] = []
        left = request.messages
        for piece in self.routes[request.topic].ranges:
            pid = piece.partition_id
            if pid in may and pid not in lost and pid not in mine & self.recalled and request.messages:
                grants += self._grant_of(pid, request, positions.get(pid, -1), left)
                left = request.messages - sum(x.last - x.first + 1 for g in grants for x in g.leases)
        return PollReply(tuple(grants), self.group.lease_ms, self.draining, revoked, lost)

    def _grant_of(self, pid: int, request: PollRequest, expects: int, left: int) -> list[Grant]:
        kept, partition, now = self.kept[pid], self.partitions[pid], self.now_ms()
        new = kept.token != request.token
        if new and kept.token and kept.until > now:
            return []
        kept.token, kept.member, kept.until = request.token, request.member, now + self.group.lease_ms
        found = {
            offset: one
            for offset, one in sorted(kept.unsettled.items())
            if new or not one.received or offset >= expects
        }
        alone = [offset for offset, one in found.items() if one.alone][:1]
        found = {offset: one for offset, one in found.items() if not alone or offset <= alone[0]}
        found = dict(list(found.items())[: max(0, left)])
        while not alone and len(found) < left and kept.cursor < partition.end:
            found[kept.cursor] = kept.unsettled[kept.cursor] = Unsettled()
            kept.cursor += 1
        for offset, one in found.items():
            one.received = True
            if request.on_delivery:
                del kept.unsettled[offset]
        if not found and not new:
            return []
        leases = _leases(found)
        batches = tuple(
            b
            for b in partition.batches
            if any(x.first <= b.last_offset and x.last >= b.base_offset for x in leases)
        )
        position = max(found) + 1 if found else kept.cursor
        lines = {line.id: line for line in kept.parked.values()} if expects < 0 else {}
        return [
            Grant(partition.topic, partition.number, pid, leases, batches, position, tuple(lines.values()))
        ]

    async def unpark(self, request: UnparkRequest) -> PollReply:
        self.calls.append(("unpark", request))
        await self._fault(self.on, "unpark")
        pid = request.partition_id
        kept, partition = self.kept[pid], self.partitions[pid]
        if kept.token != request.token:
            return PollReply((), self.group.lease_ms, lost=(pid,))
        keys = {r.offset: r.key for b in partition.batches for r in records(b.data)}
        mine = [o for o in range(request.first, request.last + 1) if keys[o] == request.key]
        found = mine[: request.max_messages]
        upto = found[-1] if len(found) == request.max_messages else request.last
        for offset in found:
            if kept.parked.pop(offset, None) is not None:
                kept.unsettled[offset] = Unsettled()
        leases = _leases({offset: kept.unsettled[offset] for offset in found})
        grant = Grant(partition.topic, partition.number, pid, leases, tuple(partition.batches), upto + 1)
        await self._fault(self.after, "unpark")
        return PollReply((grant,), self.group.lease_ms)

    def _park(self, kept: Kept, part: Settle) -> None:
        """Whatever is acked beside it, of its key, is in the line from now on."""
        keys = {r.offset: r.key for b in self.partitions[part.partition_id].batches for r in records(b.data)}
        acked = {o for v in part.verdicts if v.kind == "ack" for o in range(v.first, v.last + 1)}
        for line in (v.line for v in part.verdicts if v.line is not None):
            mine = [o for o in acked if line.first <= o <= line.last and keys[o] == line.key]
            assert len(mine) == line.messages
            before = next((one for one in kept.parked.values() if one.id == line.id), line)
            first, last = min(before.first, line.first), max(before.last, line.last)
            offsets = [*mine, *(o for o, one in kept.parked.items() if one.id == line.id)]
            wide = Line(line.id, line.key, first, last, len(offsets))
            kept.parked.update(dict.fromkeys(offsets, wide))

    # ---- settling ----

    async def settle(self, topic: str, group: str, parts: Sequence[Settle]) -> SettleReply:
        self.calls.append(("settle", list(parts)))
        await self._fault(self.on, "settle")
        self.settled.append(list(parts))
        lost: list[tuple[Settle, tuple[Span, ...]]] = []
        kept: list[tuple[Settle, tuple[Lease, ...]]] = []
        for part in parts:
            gone, stay = self._settle_part(part)
            lost += [(part, gone)] if gone else []
            kept += [(part, stay)] if stay else []
        self.news.set()
        await self._fault(self.after, "settle")
        return SettleReply(tuple(lost), tuple(kept))

    def _settle_part(self, part: Settle) -> tuple[tuple[Span, ...], tuple[Lease, ...]]:
        kept = self.kept[part.partition_id]
        stay: dict[int, Unsettled] = {}
        if kept.token != part.token:
            spans = [(v.first, v.last) for v in part.verdicts]
            return tuple(s for s in spans if any(o in kept.unsettled for o in range(s[0], s[1] + 1))), ()
        self._park(kept, part)
        for verdict in part.verdicts:
            for offset in range(verdict.first, verdict.last + 1):
                one = kept.unsettled.get(offset)
                if one is None or verdict.kind == "park":
                    continue
                if verdict.kind in ("ack", "dead"):
                    self._remove(kept, offset, dead=verdict.kind == "dead")
                    continue
                one.not_before = self.now_ms() + verdict.delay_ms if verdict.at_ms is None else verdict.at_ms
                one.attempt += verdict.kind == "retry"
                one.alone = False
                if one.attempt > self.group.max_attempts:
                    if self.group.exhausted == "dead":
                        self._remove(kept, offset, dead=True)
                        continue
                    one.not_before = STOPPED
                stay[offset] = one
        return (), _leases(stay)

    def _remove(self, kept: Kept, offset: int, *, dead: bool) -> None:
        del kept.unsettled[offset]
        self.dead += [offset] if dead else []

    # ---- holders ----

    async def hand_over(self, topic: str, group: str, token: int, partition_ids: Sequence[int]) -> None:
        await self._fault(self.on, "hand_over")
        for pid in partition_ids:
            if self.kept[pid].token == token:
                self.handed_over.append(pid)
                self.recalled.discard(pid)
                self._free(pid)
        self.gave_up.set()
        self.news.set()

    def _free(self, pid: int, token: int = 0) -> None:
        kept = self.kept[pid]
        kept.token = token
        for one in kept.unsettled.values():
            one.received = False

    def take_over(self, pid: int, token: int = 999) -> None:
        """Somebody else holds it from now on."""
        self._free(pid, token)
        self.kept[pid].until = self.now_ms() + self.group.lease_ms

    def restart(self, pid: int) -> None:
        """Stopped messages begin anew; their holder is to hand the partition over."""
        for one in self.kept[pid].unsettled.values():
            if one.not_before == STOPPED:
                one.not_before = self.now_ms()
        self.recalled.add(pid)
        self.news.set()

    def beat(self, beats: Sequence[Beat]) -> list[tuple[Held, tuple[Span, ...]]]:
        lost: list[tuple[Held, tuple[Span, ...]]] = []
        for beat in beats:
            self.beats.append(beat)
            for held in beat.held:
                kept = self.kept[held.partition_id]
                if kept.token == held.token:
                    kept.until = self.now_ms() + self.group.lease_ms
                else:
                    lost.append((held, held.spans))
        return lost

    def open_offsets(self, pid: int) -> list[int]:
        return sorted({*self.kept[pid].unsettled, *self.kept[pid].parked})


def _leases(found: dict[int, Unsettled]) -> tuple[Lease, ...]:
    """Neighbours that are alike in one lease."""
    leases: list[Lease] = []
    offsets = list(found)
    for before, offset in pairwise([-9, *offsets]):
        one = found[offset]
        if offset == before + 1 and found[before] == one and not one.alone:
            last = leases.pop()
            leases.append(Lease(last.first, offset, one.attempt, one.alone, one.not_before))
        else:
            leases.append(Lease(offset, offset, one.attempt, one.alone, one.not_before))
    return tuple(leases)
