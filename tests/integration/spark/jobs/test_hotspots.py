"""The job hotspots: loads are exact, and the plan that comes of them can be carried out."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import postroom
from postroom.errors import InvalidSetting
from postroom.model.messages.slot import TEST_VECTORS, slot_of
from postroom.spark.jobs.hotspots import HotspotsOptions, hotspots, slot_column
from tests.contract.cli_runner import Cli


def test_spark_computes_the_same_slots(spark: Any) -> None:
    vectors = [(bytearray(key), slot) for key, slot in TEST_VECTORS]
    rows = spark.createDataFrame(vectors, "key binary, slot int")
    assert rows.where(slot_column("key") != rows["slot"]).count() == 0


def test_loads_and_a_plan(spark: Any, url: str, mq: Any) -> None:
    mq.create_topic("orders", partitions=2)
    keys = [f"k{n}" for n in range(200)]
    low = [key for key in keys if slot_of(key.encode()) < 512]
    sent = keys + low * 9 + ["k7"] * 50
    mq.send_many("orders", [postroom.Message(b"x" * 10, key=key) for key in sent[:300]])
    mq.merge("orders", 0, 1)
    mq.split("orders", 2)
    mq.send_many("orders", [postroom.Message(b"x" * 10, key=key) for key in sent[300:]])
    mq.send_many("orders", [postroom.Message(b"y")] * 30)
    away = slot_of(b"k1")
    mq.send_many("orders", [postroom.Message(b"z", key="k1")] * 3, slot=1023 if away < 512 else 0)

    found = hotspots(spark, HotspotsOptions({"url": url}, "orders", factor=1.3, top=3))

    counts = Counter(sent)
    assert (found.messages, found.keyless, found.placed) == (len(sent) + 33, 30, 3)
    assert found.bytes == sum(len(key) + 10 for key in sent) + 30 + 3 * 3
    k7 = found.keys[0]
    assert (k7.name, k7.slot) == ("k7", slot_of(b"k7"))
    assert (k7.messages, k7.bytes, k7.too_hot) == (counts["k7"], 12 * counts["k7"], False)
    counts["k1"] += 3
    assert [key.messages for key in found.keys] == sorted(counts.values(), reverse=True)[:3]
    slots = Counter(slot_of(key.encode()) for key in sent)
    assert [(heat.slot, heat.messages) for heat in found.slots[:1]] == slots.most_common(1)
    halves = [sum(load for slot, load in slots.items() if slot // 512 == half) for half in (0, 1)]
    assert [(p.name, p.messages) for p in found.partitions] == [("3", halves[0]), ("4", halves[1])]
    plan = found.plan
    assert (plan.version, plan.even, plan.too_hot, plan.topic) == (3, True, (), "orders")
    assert [piece.load for piece in plan.before] == halves and len(plan.steps) == 2
    for step in plan.steps:
        mq.split("orders", mq.route("orders").of_slot(step.first_slot).partition, at=step.at)
    assert [r.last_slot for r in mq.route("orders").ranges] == [piece.last_slot for piece in plan.after]


def test_a_key_that_is_too_hot(spark: Any, url: str, mq: Any) -> None:
    mq.create_topic("orders", partitions=4)
    some = [postroom.Message(b"x", key=f"k{n}") for n in range(40)]
    mq.send_many("orders", [*some, postroom.Message(b"x" * 5000, key=b"\xff\xfe")])
    found = hotspots(spark, HotspotsOptions({"url": url}, "orders", weigh="bytes"))
    assert [key.name for key in found.hot_keys] == ["hex:FFFE"] and found.keys[0].share > 0.9
    assert found.plan.too_hot == (slot_of(b"\xff\xfe"),) and not found.plan.even
    assert [heat.too_hot for heat in found.slots[:2]] == [True, False]


def test_nothing_stored(spark: Any, url: str, mq: Any) -> None:
    mq.create_topic("orders", partitions=4)
    found = hotspots(spark, HotspotsOptions({"url": url}, "orders", merge_cold=True))
    assert (found.messages, found.keys, found.plan.steps) == (0, (), ())
    with pytest.raises(InvalidSetting, match="weigh='colour': choose messages or bytes"):
        HotspotsOptions({"url": url}, "orders", weigh="colour")  # type: ignore[arg-type]
    with pytest.raises(InvalidSetting, match="factor=1: choose more than 1"):
        hotspots(spark, HotspotsOptions({"url": url}, "orders", factor=1))


@pytest.mark.usefixtures("spark")
def test_from_the_load_to_the_route(
    mq: Any, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R47: one command looks, the next one does it."""
    monkeypatch.chdir(tmp_path)
    cli = Cli(tmp_path, url)
    mq.create_topic("orders", partitions=2)
    keys = [key for key in (f"k{n}" for n in range(400)) if slot_of(key.encode()) < 512]
    mq.send_many("orders", [postroom.Message(b"x", key=key) for key in [*keys, *["\xe4"] * 300]])
    shown = cli.ok("pipeline", "hotspots", "orders", "--top", "2").out
    assert "key \xe4 alone has" in shown and "too hot to split" in shown and "plan: 2 splits" in shown
    path = "split-plan-orders.json"
    assert f"written to {path}; carry it out with `postroom route apply {path}`" in shown
    cli.ok("route", "apply", path, "--yes")
    again = cli.ok("pipeline", "hotspots", "orders", "--json", "--plan", "other.json").json
    assert (again["plan"]["version"], len(again["partitions"]), again["plan_file"]) == (3, 4, None)
    assert again["plan"]["steps"] == [] and not Path("other.json").exists()
    assert "no messages in this range" in cli.ok("pipeline", "hotspots", "orders", "--until", "1h").out
    bad = cli("pipeline", "hotspots", "orders", "--factor", "1", "--json")
    assert (bad.code, bad.error["error"]) == (2, "invalid_setting")
