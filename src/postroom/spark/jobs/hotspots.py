"""The job `hotspots`: the load of each key, slot and partition, and a plan that evens it out (R46, R47).

Loads are of slots, and slots never change: so what was stored under any earlier route counts for the newest
one, which the plan is for. Messages without a key go to the partitions in turn, and those that were sent with
a slot of their own are in the slot of no key: both are counted, and take no part in the plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ...config import SLOTS
from ...errors import InvalidSetting
from ...model.topology.route import Route
from ...model.topology.split_plan import SplitPlan, make_plan
from .failures import explained
from .fields import Stored, look, text_of_bytes

__all__ = ["Heat", "Hotspots", "HotspotsOptions", "hotspots", "slot_column"]

_GOLDEN = 2654435769  # model.slot
_SHIFT = 22

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class HotspotsOptions:
    queue: Mapping[str, str] = field(repr=False)  # how it is reached: url, token, …
    topic: str
    start_ms: int | None = None  # by the time of the messages
    end_ms: int | None = None
    weigh: Literal["messages", "bytes"] = "messages"  # what a load is counted in
    factor: float = 1.5  # the heaviest partition may have so many times the mean
    max_partitions: int | None = None
    merge_cold: bool = False
    top: int = 10  # so many keys and slots are named

    def __post_init__(self) -> None:
        if self.weigh not in ("messages", "bytes"):
            raise InvalidSetting(f"weigh={self.weigh!r}: choose messages or bytes")
        if not 1 <= self.top <= 10_000:
            raise InvalidSetting(f"top={self.top!r}: choose a whole number from 1 to 10000")


@dataclass(frozen=True, slots=True)
class Heat:
    """The load of something: a key, a slot, a partition of the newest route."""

    name: str
    slot: int  # of a partition its first one
    messages: int
    bytes: int
    share: float  # of all that is counted
    too_hot: bool = False  # no split makes it lighter


@dataclass(frozen=True, slots=True)
class Hotspots:
    topic: str
    messages: int
    bytes: int
    keyless: int  # messages without a key: they go to the partitions in turn
    placed: int  # messages that were sent with a slot of their own
    keys: tuple[Heat, ...]
    slots: tuple[Heat, ...]
    partitions: tuple[Heat, ...]
    plan: SplitPlan
    seconds: float = 0.0

    @property
    def hot_keys(self) -> tuple[Heat, ...]:
        return tuple(key for key in self.keys if key.too_hot)


def hotspots(spark: Any, options: HotspotsOptions, *, progress: Progress = lambda text: None) -> Hotspots:
    began = time.monotonic()
    with explained():
        stored = look(options.queue, options.topic, start_ms=options.start_ms, end_ms=options.end_ms)
        by_key = _by_key(spark, stored).persist()
        try:
            progress("adding up the load of each slot")
            slots, keyless, placed = _slots(by_key, stored.route)
            progress("looking for the hottest keys")
            keys = _hottest(by_key, options)
        finally:
            by_key.unpersist()
    weight = 0 if options.weigh == "messages" else 1
    plan = make_plan(
        stored.route,
        [slots.get(slot, (0, 0))[weight] for slot in range(SLOTS)],
        factor=options.factor,
        max_partitions=options.max_partitions,
        merge_cold=options.merge_cold,
        weighed=options.weigh,
        made_at_ms=time.time_ns() // 1_000_000,
    )
    return _result(options, stored, slots, keyless, placed, keys, plan, time.monotonic() - began)


def slot_column(key: str) -> Any:
    """`model.slot.slot_of`, computed by Spark; in two halves, so that nothing is over 64 bits."""
    from pyspark.sql import functions as F

    crc = F.crc32(F.col(key))
    high = F.shiftright(crc, 16) * F.lit(_GOLDEN)
    low = crc.bitwiseAND(F.lit(0xFFFF)) * F.lit(_GOLDEN)
    product = high.bitwiseAND(F.lit(0xFFFF)) * F.lit(0x10000) + low
    return F.shiftright(product.bitwiseAND(F.lit(0xFFFFFFFF)), _SHIFT).cast("int")


def _by_key(spark: Any, stored: Stored) -> Any:
    """partition, key, slot, messages, bytes."""
    from pyspark.sql import functions as F

    size = F.coalesce(F.octet_length("key"), F.lit(0)) + F.coalesce(F.octet_length("value"), F.lit(0))
    rows = stored.frame(spark, ["key", "value", "partition"]).groupBy("partition", "key")
    sums = rows.agg(F.count("*").alias("messages"), F.sum(size.cast("bigint")).alias("bytes"))
    return sums.withColumn("slot", slot_column("key"))


Load = tuple[int, int]
"""Messages and bytes."""


def _slots(by_key: Any, route: Route) -> tuple[dict[int, Load], Load, Load]:
    """By slot; of what has no key; of what is not where its key would be."""
    from pyspark.sql import functions as F

    rows = (
        by_key.groupBy("partition", "slot")
        .agg(F.sum("messages").alias("messages"), F.sum("bytes").alias("bytes"))
        .collect()
    )
    spans = {piece.partition: (piece.first_slot, piece.last_slot) for piece in route.partitions}
    slots: dict[int, Load] = {}
    keyless = placed = (0, 0)
    for row in rows:
        load = (row["messages"], row["bytes"])
        first, last = spans.get(row["partition"], (0, SLOTS - 1))
        if row["slot"] is None:
            keyless = _sum((keyless, load))
        elif not first <= row["slot"] <= last:
            placed = _sum((placed, load))
        else:
            slots[row["slot"]] = _sum((slots.get(row["slot"], (0, 0)), load))
    return slots, keyless, placed


def _hottest(by_key: Any, options: HotspotsOptions) -> list[Any]:
    from pyspark.sql import functions as F

    totals = by_key.where("key is not null").groupBy("key", "slot")
    totals = totals.agg(F.sum("messages").alias("messages"), F.sum("bytes").alias("bytes"))
    hottest = totals.orderBy(F.col(options.weigh).desc(), F.col("key")).limit(options.top)
    found: list[Any] = hottest.withColumn("name", text_of_bytes("key")).collect()
    return found


def _sum(loads: Iterable[Load]) -> Load:
    messages = size = 0
    for one in loads:
        messages, size = messages + one[0], size + one[1]
    return messages, size


def _result(
    options: HotspotsOptions,
    stored: Stored,
    slots: Mapping[int, Load],
    keyless: Load,
    placed: Load,
    keys: Iterable[Any],
    plan: SplitPlan,
    seconds: float,
) -> Hotspots:
    weight = 0 if options.weigh == "messages" else 1
    total = _sum((*slots.values(), keyless, placed))
    limit = options.factor * sum(piece.load for piece in plan.after) / len(plan.after)

    def heat(name: str, slot: int, load: Load, hot: bool = False) -> Heat:
        return Heat(name, slot, *load, load[weight] / total[weight] if total[weight] else 0.0, hot)

    hottest = sorted(slots.items(), key=lambda item: (-item[1][weight], item[0]))[: options.top]
    return Hotspots(
        topic=options.topic,
        messages=total[0],
        bytes=total[1],
        keyless=keyless[0],
        placed=placed[0],
        keys=tuple(
            heat(k["name"], k["slot"], (k["messages"], k["bytes"]), k[options.weigh] > limit) for k in keys
        ),
        slots=tuple(heat(str(slot), slot, load, slot in plan.too_hot) for slot, load in hottest),
        partitions=tuple(
            heat(
                str(piece.partition),
                piece.first_slot,
                _sum(load for slot, load in slots.items() if piece.first_slot <= slot <= piece.last_slot),
            )
            for piece in stored.route.ranges
        ),
        plan=plan,
        seconds=seconds,
    )
