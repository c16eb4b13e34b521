"""What a seed makes of a world: who takes part, what they do, and what is done to them.

Only draws; nothing runs here. Small on purpose: many small worlds find more than a few large ones.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

__all__ = ["DISK", "SHARD", "SHARDED_FROM", "SPOOL", "Fault", "Group", "Plan", "Sender", "plan_of"]

DISK = "127.0.0.1"  # the machine that has the files
SPOOL = "empty.spool"  # the file that spools begin with
SHARD = "other.db"  # the file of the second shard, where there is one
SHARDED_FROM = 1_000_000  # from this seed on, worlds have two; what lower ones found stays what it is
_FAULTS_S = 3.0  # they begin within this
_JOINED_S = 0.8  # by then a group of Kafka clients has its first generation
_FAILS = 2  # times that a message fails which is to be retried


@dataclass(frozen=True)
class Group:
    name: str
    mode: str
    order: str
    members: int
    lease_s: float
    slow_s: float  # a handler takes up to this
    exhausted: str = "dead"
    start: str = "earliest"


@dataclass(frozen=True)
class Sender:
    name: str
    messages: int
    keys: int  # 0: without any
    way: str  # send, many, post, stream, ids, staged, spool, outbox
    pause_s: float
    delay_s: float  # some are due up to this much later; 0: none
    within: bool = False  # an outbox: in the queue's own file, if that can be
    relays: int = 0  # of an outbox, besides its sender


@dataclass(frozen=True)
class Fault:
    at_s: float
    kind: str
    for_s: float = 0.0
    number: float = 0.0  # which, how much: as its kind wants it


@dataclass(frozen=True)
class Plan:
    served: int  # brokers; 0: everybody has the files open
    machines: int  # of clients, where they are served
    partitions: int
    storage: str
    groups: tuple[Group, ...]
    senders: tuple[Sender, ...]
    changes: int  # of the route
    faults: tuple[Fault, ...]
    bad: float  # of messages fail a few times, or are dead letters
    slow_s: float  # of the network
    flush_s: float
    max_attempts: int = 8
    poison: float = 0.0  # of messages kill whoever handles them
    sharded: bool = False  # on two files; partitions move between them

    @property
    def kinds(self) -> list[str]:
        """What takes part, to be counted over many seeds."""
        found = ["served" if self.served else "embedded", *(["several brokers"] if self.served > 1 else [])]
        for group in self.groups:
            found += [group.mode, f"{group.mode} {group.order}" if group.mode == "ordered" else ""]
            found.append("stop" if group.exhausted == "stop" else "")
            found.append("several members" if group.members > 1 else "")
            found.append(group.start if group.mode != "broadcast" else "")
        found += [sender.way for sender in self.senders]
        found += ["several relays"] if any(sender.relays for sender in self.senders) else []
        found += ["several faults"] if len(self.faults) > 1 else []
        found += ["delayed"] if any(sender.delay_s for sender in self.senders) else []
        found += ["route changes"] if self.changes else []
        found += ["two shards"] if self.sharded else []
        found += ["bad messages"] if self.bad else []
        found += ["poison"] if self.poison else []
        return sorted({one for one in found if one})

    @property
    def steps(self) -> bool:
        """Whether a wall clock is set: what is due by it may then come sooner or later."""
        return any(fault.kind == "clock" for fault in self.faults)

    @property
    def kafka(self) -> bool:
        return any(group.mode == "kafka" for group in self.groups)

    def lines(self) -> list[str]:
        shape = f"{self.served} brokers" if self.served else "embedded"
        head = f"plan: {shape}, {self.partitions} partitions, {self.changes} changes of the route"
        parts = [f"plan: {one}" for one in (*self.groups, *self.senders, *self.faults)]
        return [head, *parts]


_EMBEDDED = (
    "kill", "kill", "commit", "commit", "pause", "power", "clock", "failing", "full", "slow", "glitch",
    "glitch",
)  # fmt: skip
_SERVED = (
    "kill", "commit", "commit", "reply", "reply", "reply", "pause", "power", "cut", "cut", "break", "clock",
    "failing", "full", "slow", "glitch", "glitch",
)  # fmt: skip
_UNSURE = ("kill", "commit", "commit", "cut", "pause")  # a sender does not know what became of a message
_ABSENT = ("pause", "pause", "cut", "kill", "reply")  # a member is given up, and comes back
_ONE_OF_MANY = ("glitch", "glitch", "reply", "commit")  # a batch fails, and those behind it do not


def plan_of(seed: int) -> Plan:
    draw = random.Random(f"plan {seed}")
    plan = drawn(draw)
    return plan if seed < SHARDED_FROM else _on_shards(draw, plan)


def _on_shards(draw: random.Random, plan: Plan) -> Plan:
    """Partitions move between two files, one of which may fail by itself."""
    away = tuple(_fault(draw, "away") for _ in range(draw.choice((0, 1, 1, 2))))
    faults = tuple(sorted((*plan.faults, *away), key=lambda fault: fault.at_s))
    return replace(
        plan,
        sharded=True,
        changes=0 if plan.kafka else draw.choice((1, 2, 3)),
        faults=faults,
        senders=tuple(replace(sender, within=False) for sender in plan.senders),
        max_attempts=plan.max_attempts + len(away),
    )


def drawn(draw: random.Random) -> Plan:
    served = draw.choice((0, 0, 0, 1, 1, 2))
    senders = tuple(_sender(draw, number) for number in range(draw.choice((1, 1, 1, 2))))
    again = any(sender.way == "ids" for sender in senders)  # some is sent again under its id
    faults = _faults(draw, _kinds(draw, senders, served))
    bad, poison = draw.choice(((0.0, 0.0), (0.0, 0.0), (0.0, 0.3), (0.1, 0.0), (0.4, 0.0)))
    plan = Plan(
        served=served,
        machines=draw.choice((1, 2)),
        partitions=draw.choice((1, 1, 1, 2)),
        storage="durable",
        groups=_groups(draw),
        senders=senders,
        changes=draw.choice((0, 1, 2) if again else (0, 0, 0, 1, 1, 2)),
        faults=faults,
        bad=bad,
        slow_s=draw.choice((0.0001, 0.002, 0.02)),
        flush_s=draw.choice((0.0002, 0.002, 0.01)),
        # one more than a message can expire while it is held alone: no innocent may be a dead letter
        max_attempts=max(1, len(faults) + (poison > 0)) + (_FAILS if bad else 0),
        poison=poison,
    )
    return _with_kafka(draw, plan) if served and draw.random() < 0.2 else plan


def _with_kafka(draw: random.Random, plan: Plan) -> Plan:
    """A group of Kafka clients beside the others; or alone, and its members are given up and come back.

    They count partitions: the route stays.
    """
    members, lease_s = draw.choice((1, 2, 2, 3)), draw.choice((1.0, 2.0))
    group = Group("kafka", "kafka", "partition", members, lease_s, draw.choice((0.0, 0.5)))
    if draw.random() < 0.5:
        return replace(plan, groups=(*plan.groups, group), changes=0)
    later = [replace(fault, at_s=fault.at_s + _JOINED_S) for fault in _faults(draw, _ABSENT)]
    slow = replace(group, members=max(2, members), lease_s=1.0, slow_s=0.8)
    return replace(plan, groups=(slow,), changes=0, faults=tuple(later))


def _kinds(draw: random.Random, senders: tuple[Sender, ...], served: int) -> tuple[str, ...]:
    """The faults that may come; half of the time those that harm most who takes part."""
    ways = {sender.way for sender in senders}
    if draw.random() < 0.5:
        if "ids" in ways:
            return _UNSURE
        if "stream" in ways:
            return _ONE_OF_MANY
    return _SERVED if served else _EMBEDDED


_MODES = (
    ("shared",), ("shared",), ("ordered",), ("ordered",), ("ordered",), ("shared", "ordered"), ("broadcast",),
)  # fmt: skip


def _groups(draw: random.Random) -> tuple[Group, ...]:
    return tuple(
        Group(
            name={"shared": "billing", "ordered": "ledger", "broadcast": "caches"}[mode],
            mode=mode,
            order=draw.choice(("key", "key", "partition")),
            members=draw.choice((1, 2, 2, 3)),
            lease_s=draw.choice((0.6, 1.0, 2.0)),
            slow_s=draw.choice((0.0, 0.0, 0.05, 0.5)),
            exhausted=draw.choice(("dead", "stop")) if mode == "ordered" else "dead",
            start=draw.choice(("earliest", "latest")),
        )
        for mode in draw.choice(_MODES)
    )


_WAYS = ("send", "many", "many", "post", "stream", "stream", "ids", "staged", "spool", "outbox")


def _sender(draw: random.Random, number: int) -> Sender:
    way = draw.choice(_WAYS)
    return Sender(
        name=f"p{number}",
        messages=draw.randint(2, 9),
        keys=draw.choice((0, 1, 1, 2, 3)),
        way=way,
        pause_s=draw.choice((0.0, 0.1, 0.5)),
        delay_s=draw.choice((0.0, 0.0, 1.0)) if way != "staged" else 0.0,
        within=way == "outbox" and draw.random() < 0.5,
        relays=int(way == "outbox" and draw.random() < 0.5),
    )


def _faults(draw: random.Random, kinds: tuple[str, ...]) -> tuple[Fault, ...]:
    """Some of each, or one kind again and again."""
    count = draw.choice((0, 1, 1, 2, 2, 3, 5))
    kinds = (draw.choice(kinds),) if draw.random() < 0.3 else kinds
    found = [_fault(draw, draw.choice(kinds)) for _ in range(count)]
    return tuple(sorted(found, key=lambda fault: fault.at_s))


def _fault(draw: random.Random, kind: str) -> Fault:
    at_s = draw.choice((0.02, 0.1, 0.5, _FAULTS_S)) * draw.random()
    longest = {"pause": 5.0, "cut": 5.0, "failing": 2.0, "away": 8.0, "full": 2.0, "slow": 1.5}.get(kind, 0.5)
    return Fault(at_s, kind, longest * draw.random() ** 2, draw.random())
