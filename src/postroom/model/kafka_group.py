"""A consumer group of Kafka's classic kind: who is in it, in which generation, and who waits for whom.

The members of a group join, one of them (the leader, a client) assigns the partitions, and all of them learn
the assignment by their sync: that is a generation. Whoever comes, goes or falls silent begins the next one.
Joins and syncs wait here under tickets; what is to be answered is gathered in `replies`. Time and new ids are
arguments, what members send each other is opaque.

What survives is a `Generation`, written when it is complete (`is_unwritten`): answers leave once it is. A
coordinator that takes over goes on from there, so a member in it is never unknown. Must never let somebody
commit who is not a member of the generation it names (I28).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum

from .frozen import dataclass as frozen

__all__ = [
    "Assigned",
    "ClassicGroup",
    "Generation",
    "GroupError",
    "Joined",
    "Joining",
    "Phase",
    "Rules",
    "StoredMember",
    "Who",
]

Protocols = tuple[tuple[str, bytes], ...]
"""What a member can agree on, by preference: the name of an assignor, and its metadata."""


class GroupError(IntEnum):
    """Kafka's error codes, as far as they are decided here."""

    NONE = 0
    NOT_COORDINATOR = 16
    ILLEGAL_GENERATION = 22
    INCONSISTENT_PROTOCOL = 23
    UNKNOWN_MEMBER = 25
    REBALANCING = 27
    INVALID_REQUEST = 42
    MEMBER_ID_REQUIRED = 79
    GROUP_FULL = 81
    FENCED_INSTANCE = 82


class Phase(StrEnum):
    """As Kafka's tools show them."""

    EMPTY = "Empty"
    PREPARING = "PreparingRebalance"
    COMPLETING = "CompletingRebalance"
    STABLE = "Stable"


@frozen(frozen=True, slots=True)
class Who:
    """The member that asks. `instance`: the name that a static member keeps over restarts (KIP-345)."""

    member: str = ""
    generation: int = -1
    instance: str | None = None


@frozen(frozen=True, slots=True)
class StoredMember:
    id: str
    instance: str | None
    client: str
    host: str
    session_ms: int
    rebalance_ms: int
    protocols: Protocols
    assignment: bytes = b""

    @property
    def size(self) -> int:
        """About how many bytes it takes in the row of its group."""
        return 200 + len(self.assignment) + sum(len(name) + len(data) for name, data in self.protocols)


@frozen(frozen=True, slots=True)
class Generation:
    """A generation that is complete, as it is written down. Without members: the group is empty."""

    number: int = 0
    protocol_type: str = ""
    protocol: str = ""
    leader: str = ""
    members: tuple[StoredMember, ...] = ()

    def check_commit(self, who: Who) -> GroupError:
        """Whether this member may commit offsets; nobody in particular may while the group is empty."""
        if not self.members and not who.member and who.generation < 0:
            return GroupError.NONE
        own = next((one for one in self.members if one.id == who.member), None)
        if who.instance is not None:
            named = next((one for one in self.members if one.instance == who.instance), None)
            if named is not None and named is not own:
                return GroupError.FENCED_INSTANCE
        if own is None or (who.instance is not None and own.instance != who.instance):
            return GroupError.UNKNOWN_MEMBER
        return GroupError.NONE if who.generation == self.number else GroupError.ILLEGAL_GENERATION

    @property
    def session_ms(self) -> int:
        """For so long members may be silent; 0: there are none."""
        return max((one.session_ms for one in self.members), default=0)


@frozen(frozen=True, slots=True)
class Rules:
    first_join_ms: int = 300  # a group that was empty waits for more members
    most_members: int = 1000
    most_bytes: int = 4 * 1024 * 1024  # of its row


@frozen(frozen=True, slots=True)
class Joining:
    """What somebody who joins says. `needs_id`: it is to come again with the id that it gets (KIP-394)."""

    member: str
    instance: str | None
    client: str
    host: str
    session_ms: int
    rebalance_ms: int
    protocol_type: str
    protocols: Protocols
    needs_id: bool = True
    skips: bool = False  # it understands that it leads and assigns nothing


@frozen(frozen=True, slots=True)
class Joined:
    """The answer to a join. `members`: for the leader, ids, instances and metadata of all."""

    error: GroupError
    member: str = ""
    generation: int = -1
    protocol_type: str = ""
    protocol: str = ""
    leader: str = ""
    members: tuple[tuple[str, str | None, bytes], ...] = ()
    skip_assignment: bool = False


@frozen(frozen=True, slots=True)
class Assigned:
    """The answer to a sync."""

    error: GroupError
    protocol_type: str = ""
    protocol: str = ""
    assignment: bytes = b""


@dataclass(slots=True)
class _Member:
    stored: StoredMember
    until: int  # it has to be heard of before
    joined: bool = False  # for the generation that is being made
    synced: bool = False
    join_ticket: int | None = None
    sync_ticket: int | None = None

    @property
    def is_parked(self) -> bool:
        return self.join_ticket is not None or self.sync_ticket is not None

    def heard(self, now: int) -> None:
        self.until = now + self.stored.session_ms


@dataclass(slots=True)
class _Barrier:
    """A join is waited for until then, and completed no sooner than `not_before`."""

    until: int
    not_before: int = 0
    first: bool = False  # the group was empty: more may come


@dataclass(slots=True)
class ClassicGroup:
    """A group in the memory of its coordinator, from its last generation on."""

    written: Generation
    now: int
    rules: Rules = field(default_factory=Rules)
    number: int = field(init=False)
    phase: Phase = field(init=False, default=Phase.EMPTY)
    protocol_type: str = field(init=False, default="")
    protocol: str = field(init=False, default="")
    leader: str = field(init=False, default="")
    is_unwritten: bool = field(init=False, default=False)  # `generation` is to be written before any answer
    replies: list[tuple[int, Joined | Assigned]] = field(init=False, default_factory=list)
    _members: dict[str, _Member] = field(init=False, default_factory=dict)
    _promised: dict[str, int] = field(init=False, default_factory=dict)  # ids given out, and until when
    _barrier: _Barrier = field(init=False, default_factory=lambda: _Barrier(0))

    def __post_init__(self) -> None:
        last = self.written
        self.number, self.protocol_type, self.protocol = last.number, last.protocol_type, last.protocol
        self.leader = last.leader
        for stored in last.members:
            self._members[stored.id] = _Member(stored, self.now + stored.session_ms, synced=True)
        self.phase = Phase.STABLE if self._members else Phase.EMPTY

    @property
    def generation(self) -> Generation:
        """As it is to be written."""
        members = tuple(one.stored for one in self._members.values())
        return Generation(self.number, self.protocol_type, self.protocol, self.leader, members)

    @property
    def is_idle(self) -> bool:
        """Nobody is in it, and nobody is about to join."""
        return self.phase is Phase.EMPTY and not self._promised

    # ---- joining ----

    def join(self, ticket: int, asked: Joining, new_id: str, now: int) -> None:
        """Answered at once, or when all have joined. `new_id`: for a member that has none yet."""
        error = self._refusal(asked)
        if error:
            self._say_joined(ticket, Joined(error, asked.member))
        elif asked.member in self._members:
            self._join_again(ticket, self._members[asked.member], asked, now)
        elif not asked.member and (old := self._static(asked.instance)) is not None:
            self._replace(ticket, old, asked, new_id, now)
        elif not asked.member and asked.instance is None and asked.needs_id:
            self._promised[new_id] = now + asked.session_ms
            self._say_joined(ticket, Joined(GroupError.MEMBER_ID_REQUIRED, new_id))
        else:
            self._promised.pop(asked.member, None)
            self._enter(ticket, asked, asked.member or new_id, now)

    def _refusal(self, asked: Joining) -> GroupError:
        if asked.member and asked.member not in self._promised:
            error = self._unknown(asked.member, asked.instance)
            if error:
                return error
        others = [one.stored for one in self._members.values() if one.stored.id != asked.member]
        others = [one for one in others if asked.instance is None or one.instance != asked.instance]
        if self._is_full(others, asked):
            return GroupError.GROUP_FULL
        return GroupError.NONE if self._can_agree(others, asked) else GroupError.INCONSISTENT_PROTOCOL

    def _is_full(self, others: list[StoredMember], asked: Joining) -> bool:
        size = sum(one.size for one in others) + _stored(asked, "").size
        promised = len(self._promised.keys() - {asked.member})
        return len(others) + promised >= self.rules.most_members or size > self.rules.most_bytes

    def _can_agree(self, others: list[StoredMember], asked: Joining) -> bool:
        """Whether there is a protocol that all members have, also with this one."""
        if not asked.protocol_type or not asked.protocols:
            return False
        if not others:
            return True
        common = {name for name, _ in asked.protocols}.intersection(*(map(_names, others)))
        return asked.protocol_type == self.protocol_type and bool(common)

    def _enter(self, ticket: int, asked: Joining, id: str, now: int) -> None:
        member = _Member(_stored(asked, id), now + asked.session_ms, joined=True, join_ticket=ticket)
        if not self._members:
            self.protocol_type, self.leader = asked.protocol_type, id
        self._members[id] = member
        self._rebalance(now)
        if self._barrier.first:
            self._barrier.not_before = min(now + self.rules.first_join_ms, self._barrier.until)
        self._complete_if_ready(now)

    def _join_again(self, ticket: int, member: _Member, asked: Joining, now: int) -> None:
        """A member that changed, or the leader, begins a new generation; others may have missed an answer."""
        same = member.stored.protocols == asked.protocols
        is_repeat = self.phase is Phase.COMPLETING or (
            self.phase is Phase.STABLE and member.stored.id != self.leader
        )
        self._renewed(member, asked, member.stored.id, now)
        if same and is_repeat:
            self._say_joined(ticket, self._outcome(member))
            return
        self._park(ticket, member)
        self._rebalance(now)
        self._complete_if_ready(now)

    def _replace(self, ticket: int, old: _Member, asked: Joining, new_id: str, now: int) -> None:
        """A static member is back under its name: with a new id, and with what was assigned to it."""
        self._answer(old, GroupError.FENCED_INSTANCE)
        before, was_leader = old.stored.id, old.stored.id == self.leader
        self._renewed(old, asked, new_id, now)
        self._members = {one.stored.id: one for one in self._members.values()}  # in their order
        self.leader = new_id if was_leader else self.leader
        if self.phase is Phase.STABLE and self._vote() == self.protocol:
            self.is_unwritten = True
            outcome = self._outcome(old)
            if was_leader and asked.skips:
                outcome = replace(outcome, skip_assignment=True)
            elif was_leader:  # it must not assign: what it says would not reach the others
                outcome = replace(outcome, leader=before, members=())
            self._say_joined(ticket, outcome)
            return
        self._park(ticket, old)
        self._rebalance(now)
        self._complete_if_ready(now)

    def _renewed(self, member: _Member, asked: Joining, id: str, now: int) -> None:
        member.stored = replace(_stored(asked, id), assignment=member.stored.assignment)
        member.heard(now)
        if len(self._members) == 1:  # nobody else minds
            self.protocol_type = asked.protocol_type

    def _park(self, ticket: int, member: _Member) -> None:
        self._answer(member, GroupError.REBALANCING)
        member.join_ticket, member.joined = ticket, True

    def _rebalance(self, now: int) -> None:
        """Begin to gather the next generation, if that has not begun."""
        if self.phase is Phase.PREPARING:
            return
        for member in self._members.values():
            member.synced = False
            if member.sync_ticket is not None:
                self._say_assigned(member, Assigned(GroupError.REBALANCING))
            if member.join_ticket is None:
                member.joined = False
        first = self.phase is Phase.EMPTY
        longest = max((one.stored.rebalance_ms for one in self._members.values()), default=0)
        self._barrier = _Barrier(now + longest, first=first)
        self.phase = Phase.PREPARING

    def _complete_if_ready(self, now: int) -> None:
        ready = not self._promised and all(one.joined for one in self._members.values())
        if self.phase is Phase.PREPARING and ready and now >= self._barrier.not_before:
            self._complete(now)

    def _complete(self, now: int) -> None:
        """Those who came are the next generation; static members have until their session ends."""
        for id, member in list(self._members.items()):
            if not member.joined and member.stored.instance is None:
                del self._members[id]
        here = [one for one in self._members.values() if one.joined]
        if not here and self._members:
            self._barrier = _Barrier(now + max(one.stored.rebalance_ms for one in self._members.values()))
            return
        self.number += 1
        if not here:
            self._empty()
            return
        if self.leader not in self._members or not self._members[self.leader].joined:
            self.leader = here[0].stored.id
        self.protocol, self.phase = self._vote(), Phase.COMPLETING
        self._barrier = _Barrier(now + max(one.stored.rebalance_ms for one in here))
        for member in self._members.values():
            member.heard(now)
            member.stored = replace(member.stored, assignment=b"")
            ticket, member.join_ticket, member.joined = member.join_ticket, None, False
            if ticket is not None:
                self._say_joined(ticket, self._outcome(member))

    def _empty(self) -> None:
        self.phase, self.protocol, self.leader, self.is_unwritten = Phase.EMPTY, "", "", True

    def _vote(self) -> str:
        """The protocol that most members prefer of those that all of them have."""
        each = [one.stored for one in self._members.values()]
        common = set(_names(each[0])).intersection(*(map(_names, each)))
        votes = Counter(next((name for name in _names(one) if name in common), "") for one in each)
        return votes.most_common(1)[0][0]

    def _outcome(self, member: _Member) -> Joined:
        """What a member of the newest generation is told."""
        members: tuple[tuple[str, str | None, bytes], ...] = ()
        if member.stored.id == self.leader:
            everybody = [one.stored for one in self._members.values()]
            members = tuple((one.id, one.instance, dict(one.protocols)[self.protocol]) for one in everybody)
        return Joined(
            GroupError.NONE, member.stored.id, self.number, self.protocol_type, self.protocol, self.leader,
            members,
        )  # fmt: skip

    # ---- syncing ----

    def sync(
        self,
        ticket: int,
        who: Who,
        assignments: Mapping[str, bytes],
        now: int,
        *,
        protocol_type: str | None = None,
        protocol: str | None = None,
    ) -> None:
        """Answered at once, or when the leader has said who gets what."""
        error = self._check(who)
        if not error and self.phase is Phase.PREPARING:
            error = GroupError.REBALANCING
        if not error and (
            protocol_type not in (None, self.protocol_type) or protocol not in (None, self.protocol)
        ):
            error = GroupError.INCONSISTENT_PROTOCOL
        if not error and who.member == self.leader and self._is_too_large(assignments):
            error = GroupError.INVALID_REQUEST
        if error:
            self.replies.append((ticket, Assigned(error)))
            return
        member = self._members[who.member]
        member.heard(now)
        if member.sync_ticket is not None:
            self._say_assigned(member, Assigned(GroupError.REBALANCING))
        member.sync_ticket, member.synced = ticket, True
        if self.phase is Phase.COMPLETING and who.member == self.leader:
            self._assign(assignments, now)
        elif self.phase is Phase.STABLE:
            self._say_assigned(member, self._assigned(member))

    def _is_too_large(self, assignments: Mapping[str, bytes]) -> bool:
        size = sum(len(one) for one in assignments.values())
        return size + sum(one.stored.size for one in self._members.values()) > 2 * self.rules.most_bytes

    def _assign(self, assignments: Mapping[str, bytes], now: int) -> None:
        self.phase, self.is_unwritten = Phase.STABLE, True
        for id, member in self._members.items():
            member.stored = replace(member.stored, assignment=assignments.get(id, b""))
            if member.sync_ticket is not None:
                member.heard(now)
                self._say_assigned(member, self._assigned(member))

    def _assigned(self, member: _Member) -> Assigned:
        return Assigned(GroupError.NONE, self.protocol_type, self.protocol, member.stored.assignment)

    # ---- staying and going ----

    def beat(self, who: Who, now: int) -> GroupError:
        error = self._check(who)
        if not error:
            self._members[who.member].heard(now)
        return error or (GroupError.REBALANCING if self.phase is Phase.PREPARING else GroupError.NONE)

    def check_commit(self, who: Who, now: int) -> GroupError:
        """Whether offsets may be committed; what is written decides once more (`Generation`)."""
        if not who.member and who.generation < 0:
            empty = self.phase is Phase.EMPTY
            return GroupError.NONE if empty else GroupError.UNKNOWN_MEMBER
        error = self._check(who)
        if not error:
            self._members[who.member].heard(now)
        return error or (GroupError.REBALANCING if self.phase is Phase.COMPLETING else GroupError.NONE)

    def leave(self, who: Who, now: int) -> GroupError:
        """A static member may be named by its instance alone."""
        static = self._static(who.instance)
        if who.instance is not None and static is not None and not who.member:
            who = replace(who, member=static.stored.id)
        if who.member in self._promised and who.instance is None:
            del self._promised[who.member]
            self._complete_if_ready(now)
            return GroupError.NONE
        error = self._unknown(who.member, who.instance)
        if not error:
            self._remove(who.member, now)
        return error

    def gone(self, ticket: int, now: int) -> None:
        """Whoever waited for this answer has hung up; it may come again within its session."""
        for member in self._members.values():
            if member.join_ticket == ticket:
                member.join_ticket = None
                member.heard(now)
            elif member.sync_ticket == ticket:
                member.sync_ticket = None
                member.heard(now)

    def _remove(self, id: str, now: int) -> None:
        member = self._members.pop(id)
        self._answer(member, GroupError.UNKNOWN_MEMBER)
        if not self._members:
            self.number += 1
            self._empty()
            return
        self._rebalance(now)
        self._complete_if_ready(now)

    def _unknown(self, member: str, instance: str | None) -> GroupError:
        if instance is not None:
            static = self._static(instance)
            if static is not None and static.stored.id != member:
                return GroupError.FENCED_INSTANCE
            if static is None:
                return GroupError.UNKNOWN_MEMBER
        return GroupError.NONE if member in self._members else GroupError.UNKNOWN_MEMBER

    def _check(self, who: Who) -> GroupError:
        error = self._unknown(who.member, who.instance)
        return error or (GroupError.NONE if who.generation == self.number else GroupError.ILLEGAL_GENERATION)

    def _static(self, instance: str | None) -> _Member | None:
        if instance is None:
            return None
        return next((one for one in self._members.values() if one.stored.instance == instance), None)

    # ---- time ----

    def tick(self, now: int) -> None:
        """Whoever was silent for too long is no member any more; who is late for a generation, neither."""
        for id, until in list(self._promised.items()):
            if now >= until:
                del self._promised[id]
        for id, member in list(self._members.items()):
            if id in self._members and not member.is_parked and now >= member.until:
                self._remove(id, now)
        if self.phase is Phase.PREPARING and now >= self._barrier.until:
            self._complete(now)
        elif self.phase is Phase.COMPLETING and now >= self._barrier.until:
            self._barrier = _Barrier(now + self.generation.session_ms)
            late = [one for one in self._members.values() if not one.synced and one.stored.instance is None]
            for member in late:
                self._remove(member.stored.id, now)
        self._complete_if_ready(now)

    def due(self) -> int | None:
        """When time will change something; None: it will not."""
        return min(self._dues(), default=None)

    def _dues(self) -> Iterator[int]:
        yield from self._promised.values()
        yield from (one.until for one in self._members.values() if not one.is_parked)
        if self.phase in (Phase.PREPARING, Phase.COMPLETING):
            yield self._barrier.until
        all_joined = not self._promised and all(one.joined for one in self._members.values())
        if self.phase is Phase.PREPARING and all_joined:
            yield self._barrier.not_before

    def give_up(self, error: GroupError = GroupError.NOT_COORDINATOR) -> None:
        """Answer all who wait: somebody else coordinates the group."""
        for member in self._members.values():
            self._answer(member, error)

    # ---- answers ----

    def _answer(self, member: _Member, error: GroupError) -> None:
        """Whatever the member waits for ends with this error."""
        if member.join_ticket is not None:
            ticket, member.join_ticket = member.join_ticket, None
            self._say_joined(ticket, Joined(error, member.stored.id))
        if member.sync_ticket is not None:
            self._say_assigned(member, Assigned(error))

    def _say_joined(self, ticket: int, answer: Joined) -> None:
        self.replies.append((ticket, answer))

    def _say_assigned(self, member: _Member, answer: Assigned) -> None:
        assert member.sync_ticket is not None, "somebody waits for it"
        self.replies.append((member.sync_ticket, answer))
        member.sync_ticket = None


def _names(member: StoredMember) -> tuple[str, ...]:
    return tuple(name for name, _ in member.protocols)


def _stored(asked: Joining, id: str) -> StoredMember:
    return StoredMember(
        id, asked.instance, asked.client, asked.host, asked.session_ms, asked.rebalance_ms, asked.protocols
    )
