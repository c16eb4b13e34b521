"""What a topic and a group are set to, and what of it may be asked for.

Settings belong to the store. A consumer may ask for some; what it does not ask for is None and never
conflicts. Validation is here, so that a wrong setting is refused before anything is stored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from typing import Any, Literal

from ...config import DEFAULTS, SLOTS
from ...errors import GroupConflict, InvalidSetting, TopicConflict
from ...units import format_duration
from ..messages.slot import KEY_RULES, Keys
from .bounds import MOST_MOMENTS_MS, KafkaConfigs, Label, Long, StartOffsets, Whole
from .slow_lane import NO_LANE, LanePolicy

__all__ = [
    "FIXED",
    "Exhausted",
    "GroupSettings",
    "GroupWish",
    "Keep",
    "Mode",
    "Start",
    "Storage",
    "TopicSettings",
]

FIXED = ("mode", "order", "start")
"""Settings that a group has for its whole life."""

_UNITS = (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000))

Mode = Literal["shared", "ordered", "broadcast", "kafka"]
"""Groups in mode "kafka" are made by Kafka clients, and by nobody else."""

Keep = Literal["needed", "limits"]
Storage = Literal["durable", "volatile"]
Exhausted = Literal["dead", "stop"]

_MOST_ATTEMPTS = 1_000_000


@dataclass(frozen=True, slots=True)
class TopicSettings:
    storage: Storage = "durable"
    retention_ms: Whole = DEFAULTS.retention_ms  # 0: no limit by age
    retention_bytes: Whole = 0  # per partition; 0: no limit by size
    keep: Keep = "needed"  # "needed": never below what a group still needs; "limits": the limits win
    drop_settled: bool = False  # drop early what every group has settled
    dedup_ms: Whole = 0  # a message id is remembered for so long (R32); 0: ids are not looked at
    max_backlog: Whole = 0  # messages that the slowest group may be behind (R9); 0: no limit
    max_backlog_bytes: Whole = 0  # the same in bytes
    kafka_partitions: Whole = 0  # made for Kafka clients, who see so many partitions for ever; 0: it was not
    keys: Keys = "postroom"  # by whose rule a key has its partition, for ever: ours, or one of Kafka clients'
    kafka_configs: KafkaConfigs = ()  # what Kafka clients have set that only they ask for, by name

    @property
    def volatile(self) -> bool:
        return self.storage == "volatile"

    def __post_init__(self) -> None:
        if self.storage not in ("durable", "volatile"):
            raise InvalidSetting(
                f"storage={self.storage!r}: choose 'durable' (flushed before it is confirmed) or 'volatile' "
                "(fast, lost with a crash)"
            )
        if self.keep not in ("needed", "limits"):
            raise InvalidSetting(
                f"keep={self.keep!r}: choose 'needed' (never drop what a group still needs) or 'limits'"
            )
        for name in ("retention_ms", "retention_bytes", "dedup_ms", "max_backlog", "max_backlog_bytes"):
            if getattr(self, name) < 0:
                raise InvalidSetting(f"{name} must not be negative; 0 means no limit")

    def check_kafka(self) -> None:
        """InvalidSetting for what Kafka clients could not be promised: offsets without gaps (I28)."""
        if not 0 <= self.kafka_partitions <= SLOTS:
            raise InvalidSetting(
                f"kafka_partitions={self.kafka_partitions!r}: choose 1 to {SLOTS}, or 0 for none"
            )
        if self.keys not in KEY_RULES:
            raise InvalidSetting(
                f"keys={self.keys!r}: choose 'postroom', or for Kafka clients 'java' (also aiokafka, "
                "kafka-python and franz-go) or 'librdkafka' (also confluent-kafka)"
            )
        if self.keys != "postroom" and not self.kafka_partitions:
            raise InvalidSetting(
                f"keys={self.keys!r} is for topics of Kafka clients: set kafka_partitions=, or leave it out"
            )
        if self.kafka_partitions and self.volatile:
            raise InvalidSetting("kafka_partitions= is for storage='durable': leave one of them out")
        if self.kafka_partitions and self.dedup_ms:
            raise InvalidSetting(
                "kafka_partitions= and dedup_window= exclude each other: batches of Kafka clients are not "
                "opened, so ids are not looked at; Kafka's own idempotent producers need no window"
            )

    def check(self, asked: Mapping[str, Any], *, topic: str, partitions: tuple[int, int] | None) -> None:
        """TopicConflict where a topic that is there has something else than these settings.

        `partitions`: how many it has and how many were asked for, if that is not the same.
        """
        wrong = {} if partitions is None else {"partitions": partitions}
        wrong |= {k: (getattr(self, k), v) for k, v in asked.items() if getattr(self, k) != v}
        if wrong:
            shown = ", ".join(
                f"{_SAID.get(name, name)} {_said(name, has)} (asked for: {_said(name, wanted)})"
                for name, (has, wanted) in wrong.items()
            )
            raise TopicConflict(
                f"topic {topic!r} is there already, with {shown}: leave that out; split and merge change "
                "partitions, alter_topic changes the rest, and storage stays as it is",
                topic=topic,
            )


_SAID = {"retention_ms": "retention", "dedup_ms": "dedup_window"}


def _said(name: str, value: object) -> str:
    """Return the value as the caller would write it."""
    if not name.endswith("_ms") or not isinstance(value, int):
        return repr(value)
    if value == 0:
        return "off" if name == "dedup_ms" else "unlimited"
    return format_duration(value)


@dataclass(frozen=True, slots=True)
class Start:
    """A group starts here: it is resolved into offsets once, when the group is made."""

    kind: Literal["earliest", "latest", "time", "offsets"] = "earliest"
    time_ms: Long = 0
    offsets: StartOffsets = ()  # (partition number, offset); others start at the beginning

    def check_past(self, now_ms: int, *, name: str = "start") -> None:
        """InvalidSetting if it is a moment that has not come: nothing can start there."""
        if self.kind == "time" and self.time_ms > now_ms + DEFAULTS.tuning.client.start_ahead_ms:
            raise InvalidSetting(
                f"{name}={_moment(self.time_ms)} is in the future, where there are no messages yet; use "
                "'latest' for those that come from now on",
                name=name,
            )

    @property
    def said(self) -> str:
        """The start in words, to follow "it starts"."""
        if self.kind == "time":
            return f"at {_moment(self.time_ms)}"
        if self.kind == "offsets":
            return f"at the offsets {', '.join(f'{p}={o}' for p, o in self.offsets)}"
        return "with the next message" if self.kind == "latest" else "at the earliest message"

    def encode(self) -> str:
        if self.kind == "time":
            return f"time:{self.time_ms}"
        return f"offsets:{json.dumps(self.offsets)}" if self.kind == "offsets" else self.kind

    @staticmethod
    def decode(text: str) -> Start:
        kind, _, rest = text.partition(":")
        if kind == "time":
            return Start("time", time_ms=int(rest))
        if kind == "offsets":
            return Start("offsets", offsets=tuple((int(p), int(o)) for p, o in json.loads(rest)))
        return Start("latest" if kind == "latest" else "earliest")


def _moment(time_ms: int) -> str:
    if not 0 <= time_ms <= MOST_MOMENTS_MS:
        return f"{time_ms} ms"
    return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="seconds")


@dataclass(frozen=True, slots=True)
class GroupSettings:
    mode: Mode = "shared"
    order: str = "key"
    start: Start = Start()
    lease_ms: int = DEFAULTS.lease_ms
    max_attempts: int = DEFAULTS.max_attempts
    exhausted: Exhausted = "dead"  # after the last attempt; "stop" (ordered groups): the key waits for people
    max_hold_ms: int = DEFAULTS.max_hold_ms  # ordered groups: a failing message holds its key no longer (I10)
    expires_ms: int = 0  # the group is forgotten when nobody used it for so long (R44); 0: never
    slow_lane: LanePolicy = NO_LANE  # shared groups: sources that fail, or take long, go to a lane (R42)

    def news(self, topic: str, group: str) -> str:
        """Return what is said of a group that was made."""
        mode = "" if self.mode == "shared" else f", in mode {self.mode}"
        return f"group {group} of {topic} is new{mode}; it starts {self.start.said}"

    def __post_init__(self) -> None:
        if self.mode not in ("shared", "ordered", "broadcast", "kafka"):
            raise InvalidSetting(f"mode={self.mode!r}: choose 'shared', 'ordered' or 'broadcast'")
        if self.order not in ("key", "partition"):
            raise InvalidSetting(f"order={self.order!r}: choose 'key' or 'partition'")
        if self.exhausted not in ("dead", "stop"):
            raise InvalidSetting(f"exhausted={self.exhausted!r}: choose 'dead' (dead letters) or 'stop'")
        if self.exhausted == "stop" and self.mode != "ordered":
            raise InvalidSetting("exhausted='stop' is for groups in mode 'ordered': without order use 'dead'")
        if self.slow_lane.on and self.mode != "shared":
            raise InvalidSetting("slow_lane is for groups in mode 'shared'; leave it out, or choose that")
        if self.max_hold_ms < 1000:
            raise InvalidSetting("max_hold: at least a second, such as max_hold='1h'")
        if self.expires_ms < 0:
            raise InvalidSetting("expires must not be negative; 0 means never")
        if self.lease_ms < 100:
            raise InvalidSetting("lease: at least 100 milliseconds, such as lease=30")
        if not isinstance(self.max_attempts, int) or self.max_attempts < 1:
            raise InvalidSetting(f"max_attempts={self.max_attempts!r}: a whole number from 1 up")


@dataclass(frozen=True, slots=True)
class GroupWish:
    """The settings somebody asks for; None means "whatever the group has"."""

    mode: Mode | None = None
    order: Label | None = None
    start: Start | None = None
    lease_ms: Long | None = None
    max_attempts: Long | None = None
    exhausted: Exhausted | None = None
    max_hold_ms: Long | None = None
    expires_ms: Long | None = None
    slow_lane: LanePolicy | None = None

    def __post_init__(self) -> None:
        """InvalidSetting for what the mode that is asked for has no use for."""
        if self.mode == "kafka":
            raise InvalidSetting("mode='kafka': Kafka clients make such groups; choose 'shared' or 'ordered'")
        if self.mode not in (None, "ordered"):
            self._refuse_order(str(self.mode))
        self._refuse_silly()

    def _refuse_silly(self) -> None:
        """Refuse what is asked for, never what a group has: members still join one that was stored before."""
        if self.lease_ms is not None and self.lease_ms > DEFAULTS.longest_lease_ms:
            raise InvalidSetting("lease: at most a day, such as lease=30; heartbeats renew it", name="lease")
        if isinstance(self.max_attempts, int) and self.max_attempts > _MOST_ATTEMPTS:
            raise InvalidSetting(
                f"max_attempts: at most {_MOST_ATTEMPTS:,}, such as max_attempts=16", name="max_attempts"
            )
        for name, value in (("max_hold", self.max_hold_ms), ("expires", self.expires_ms)):
            if value is not None and value > MOST_MOMENTS_MS:
                raise InvalidSetting(f"{name}: a duration that ends one day, such as {name}='1h'", name=name)

    def _refuse_order(self, mode: str) -> None:
        for name, value in (("order", self.order), ("max_hold", self.max_hold_ms)):
            if value is not None:
                raise InvalidSetting(
                    f"{name}= is for groups in mode 'ordered', and this one is in mode {mode!r}: leave it "
                    "out, or choose mode='ordered'",
                    name=name,
                )

    def new(self) -> GroupSettings:
        """The settings of a group that is made by this."""
        settings = self.over(GroupSettings())
        self.check_use(settings.mode)
        return settings

    def check_use(self, mode: Mode) -> None:
        """InvalidSetting for what a group in that mode has no use for."""
        if mode != "ordered":
            self._refuse_order(mode)

    def over(self, settings: GroupSettings) -> GroupSettings:
        return replace(settings, **self._asked())

    def check(self, settings: GroupSettings, *, topic: str, group: str) -> None:
        """Raise GroupConflict where the group is set otherwise; its details say in what (`differs`)."""
        differs = {
            k.removesuffix("_ms"): [_show(k, getattr(settings, k)), _show(k, v)]
            for k, v in self._asked().items()
            if getattr(settings, k) != v
        }
        if differs:
            has = ", ".join(f"{name}={before}" for name, (before, _) in differs.items())
            asked = ", ".join(f"{name}={after}" for name, (_, after) in differs.items())
            raise GroupConflict(
                f"group {group!r} of topic {topic!r} has {has}, but {asked} was asked for; "
                + _way_out(topic, group, differs),
                topic=topic,
                group=group,
                differs=differs,
            )

    def _asked(self) -> dict[str, Any]:
        return {f.name: v for f in fields(self) if (v := getattr(self, f.name)) is not None}


def _show(name: str, value: Any) -> str:
    """A setting as one would write it in a call."""
    if isinstance(value, Start):
        return repr(value.encode())
    if isinstance(value, LanePolicy):
        own = {f.name: v for f in fields(value) if (v := getattr(value, f.name)) != f.default}
        shown = ", ".join(f"{one.removesuffix('_ms')}={_show(one, v)}" for one, v in own.items())
        return f"SlowLane({shown})" if value.on else "False"
    return _show_duration(value) if name.endswith("_ms") else repr(value)


def _show_duration(ms: int) -> str:
    if not ms:
        return "0"
    unit = next((unit for unit, size in _UNITS if ms % size == 0), "ms")
    return repr(f"{ms // dict(_UNITS).get(unit, 1)}{unit}")


def _way_out(topic: str, group: str, differs: dict[str, list[str]]) -> str:
    fixed = [name for name in differs if name in FIXED]
    if fixed == ["start"]:
        return "leave the setting out, or reset the group: it has started, and a reset moves it"
    if fixed:
        return (
            f"{' and '.join(fixed)} cannot be changed: leave the setting out, take another group, or delete "
            "the group and make it anew"
        )
    calls = ", ".join(f"{name}={after}" for name, (_, after) in differs.items())
    return (
        "leave the setting out, or change the group with alter_group: "
        f"await mq.alter_group({topic!r}, {group!r}, {calls})"
    )
