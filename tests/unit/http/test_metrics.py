"""Metrics: what is counted, what a scrape costs, and that documentation and examples know them all."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from postroom import App
from postroom.broker import exposition
from postroom.broker.exposition import Sampler
from postroom.broker.metrics import BOUNDS_S, OTHER, Figures, Spread, Tally, group_label, topic_label
from postroom.broker.served import figures_of, measured, unmeasured
from postroom.clock import ManualClock
from postroom.config import DEFAULTS
from postroom.errors import BacklogFull, StoreFull, StoreUnavailable
from postroom.model.policy.slow_lane import Seen
from tests.docs.pages import ROOT, table
from tests.unit.http.http_client import API, Stage, staged

FRESH_S = DEFAULTS.tuning.http.sample_fresh_s
PAGE = ROOT / "docs" / "howto" / "metrics.md"
RULES = (ROOT / "docs" / "examples" / "prometheus-rules.yml").read_text(encoding="utf-8")
DASHBOARD = json.loads((ROOT / "docs" / "examples" / "grafana-dashboard.json").read_text(encoding="utf-8"))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def stage(clock: ManualClock) -> Any:
    async with staged(clock=clock) as stage:
        await stage.post("/topics", {"name": "orders", "partitions": 1, "dedup_window": "10m"}, 201)
        yield stage


async def scrape(stage: Stage) -> dict[str, float]:
    """Samples by name and labels, the latter in the order of their names."""
    stage.app.state.metrics.sampler.last.taken_at = None  # the figures of groups are looked up again
    text = (await stage.call("GET", "/metrics")).text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


async def send(stage: Stage, *values: str, **more: Any) -> None:
    body = {"messages": [{"value": value, **more} for value in values]}
    await stage.post("/topics/orders/messages", body, 202)


# ---- what is counted ----


async def test_the_life_of_messages_is_counted(stage: Stage, clock: ManualClock) -> None:
    await send(stage, "a", "b", "c")
    await send(stage, "d", id="once")
    await send(stage, "d", id="once")
    await send(stage, "later", delay="1h")
    base = "/topics/orders/groups/billing"
    found = (await stage.post(f"{base}/poll", {}))["messages"]
    handles = [message["handle"] for message in found]
    await stage.post(
        f"{base}/settle", {"acks": handles[:1], "dead": [{"handle": handles[1], "reason": "no"}]}
    )
    clock.advance(31)
    (await stage.post(f"{base}/poll", {"max_messages": 1}))["messages"]
    await stage.error("POST", f"{API}{base}/settle", 409, json={"acks": handles[2:3]})
    got = await scrape(stage)
    both = "{group=billing,topic=orders}"
    assert got["postroom_messages_published_total{topic=orders}"] == 4
    assert got["postroom_messages_delayed_total{topic=orders}"] == 1
    assert got["postroom_batches_published_total{topic=orders}"] == 3
    assert got["postroom_messages_duplicate_total{topic=orders}"] == 1
    assert got["postroom_published_bytes_total{topic=orders}"] > 61 * 3
    assert got[f"postroom_messages_delivered_total{both}"] == 5
    assert got[f"postroom_messages_redelivered_total{both}"] == 1
    assert got["postroom_messages_settled_total{group=billing,topic=orders,verdict=ack}"] == 2
    assert got["postroom_messages_settled_total{group=billing,topic=orders,verdict=dead}"] == 1
    assert got[f"postroom_leases_lost_total{both}"] == 1
    assert got[f"postroom_messages_dead_total{both}"] == 1 == got[f"postroom_dead_letters{both}"]
    assert got[f"postroom_group_lag_messages{both}"] == 2 == got[f"postroom_group_unsettled_messages{both}"]
    assert got[f"postroom_group_oldest_age_seconds{both}"] == 31
    assert got[f"postroom_group_members{both}"] == 1
    assert got["postroom_delayed_messages{topic=orders}"] == 1
    assert got["postroom_requests_total{operation=append,outcome=ok}"] == 4
    assert got["postroom_request_seconds_count{operation=append}"] == 4
    assert got["postroom_commit_seconds_count{shard=first}"] >= 3
    assert got["postroom_writer_queue_bytes{shard=first}"] == 0
    assert got["postroom_duty_held{duty=retention}"] == 0


async def test_slow_sources_and_what_waits_in_their_lane(stage: Stage) -> None:
    base = "/topics/orders/groups/billing"
    lane = {"failures": 0.5, "at_least": 3, "clean": "1m"}
    await stage.post("/topics/orders/groups", {"group": "billing", "slow_lane": lane}, 201)
    store = stage.broker.store
    group = store.catalog.group("orders", "billing")
    store.lanes.count(group, [(store.now_ms(), Seen("shop", 3, 3))])
    assert group.settings.slow_lane.clean_ms == 60_000
    shown = await stage.get(f"{base}/lanes")
    assert [one["source"] for one in shown["sources"]] == ["shop"] and shown["waiting"] == 0
    got = await scrape(stage)
    both = "{group=billing,topic=orders}"
    assert (got[f"postroom_slow_sources{both}"], got[f"postroom_slow_lane_messages{both}"]) == (1, 0)


async def test_messages_that_used_up_their_attempts_are_counted_as_dead(
    stage: Stage, clock: ManualClock
) -> None:
    await stage.post("/topics/orders/groups", {"group": "billing", "max_attempts": 1}, 201)
    await send(stage, "x")
    base = "/topics/orders/groups/billing"
    (message,) = (await stage.post(f"{base}/poll", {}))["messages"]
    await stage.post(f"{base}/settle", {"retries": [{"handle": message["handle"]}]})
    got = await scrape(stage)
    assert got["postroom_messages_dead_total{group=billing,topic=orders}"] == 1


async def test_errors_are_counted_by_their_code(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (StoreFull("no space"), BacklogFull("behind")):

        async def refused(*args: Any, error: Exception = error, **named: Any) -> Any:
            raise error

        monkeypatch.setattr(stage.broker, "append", refused)
        await stage.client.post(f"{API}/topics/orders/messages", content=b"x")
    got = await scrape(stage)
    assert got["postroom_requests_total{operation=append,outcome=store_full}"] == 1
    assert got["postroom_requests_total{operation=append,outcome=backlog_full}"] == 1
    assert got["postroom_store_errors_total{code=store_full}"] == 1
    assert not any("code=backlog_full" in name for name in got)


async def test_limits_seals_and_duties_are_shown(stage: Stage) -> None:
    await stage.call("PUT", f"{API}/rates", json={"topic": "orders", "messages_per_s": 5})
    await stage.post("/topics/orders/route/split", {"partition": 0})
    duties = unmeasured(stage.service.broker).duties
    (retention,) = (duty for duty in duties._duties if duty.name == "retention")
    await asyncio.to_thread(duties.run_once, retention)
    got = await scrape(stage)
    assert got["postroom_rate_debt_seconds{group=,kind=topic,producer=,topic=orders}"] == 0
    assert got["postroom_sealed_partitions{topic=orders}"] == 1
    assert got["postroom_duty_held{duty=retention}"] == 1
    await asyncio.to_thread(stage.broker.store.duties.release, "retention", duties._holder)
    await asyncio.to_thread(stage.broker.store.duties.acquire, "retention", "another", 60_000)
    await asyncio.to_thread(duties.run_once, retention)
    assert (await scrape(stage))["postroom_duty_held{duty=retention}"] == 0


async def test_each_app_has_a_registry_of_its_own() -> None:
    async with staged() as one, staged() as other:
        await one.post("/topics", {"name": "orders"}, 201)
        assert "postroom_requests_total{operation=create_topic,outcome=ok}" in await scrape(one)
        assert "postroom_requests_total{operation=create_topic,outcome=ok}" not in await scrape(other)


async def test_a_measured_broker_stands_for_the_broker(stage: Stage) -> None:
    broker = measured(stage.broker)
    assert (
        measured(broker) is broker and unmeasured(broker) is stage.broker and figures_of(stage.broker) is None
    )
    assert broker.store is stage.broker.store and broker.in_thread == stage.broker.in_thread
    assert broker.now_ms() == stage.broker.now_ms()
    with pytest.raises(AttributeError):
        broker.no_such_thing  # type: ignore[attr-defined]  # noqa: B018
    task = asyncio.create_task(broker.fetch("orders", 1, 0, max_messages=1, max_bytes=1, wait_ms=20_000))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    figures = figures_of(broker)
    assert figures is not None and dict(figures.requests.items()) == {("fetch", "cancelled"): 1}


# ---- what a scrape costs ----


async def test_groups_are_looked_up_now_and_then_only(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    for group in ("one", "two", "three"):
        await stage.post("/topics/orders/groups", {"group": group}, 201)
    looks: list[str] = []
    lag = stage.broker.lag

    async def noted(topic: str, group: str) -> Any:
        looks.append(group)
        return await lag(topic, group)

    monkeypatch.setattr(stage.broker, "lag", noted)
    await scrape(stage)
    assert looks and not any(
        operation == "lag" for (operation, _), _ in stage.service.figures.requests.items()
    )
    looks.clear()
    now = [1000.0]
    sampler = Sampler(stage.broker, clock=lambda: now[0])
    assert len((await sampler.sample()).lags) == 3
    await asyncio.gather(*(sampler.sample() for _ in range(10)))
    now[0] += FRESH_S - 0.1
    await sampler.sample()
    assert len(looks) == 3 and sampler.age_s == pytest.approx(FRESH_S - 0.1)
    now[0] += 0.2
    await asyncio.gather(*(sampler.sample() for _ in range(10)))
    assert len(looks) == 6


async def test_too_many_groups_are_left_out_and_that_is_said(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exposition, "MOST_GROUPS", 2)
    for group in ("a", "b", "c", "d"):
        await stage.post("/topics/orders/groups", {"group": group}, 201)
    await stage.post("/topics", {"name": "zebras"}, 201)
    got = await scrape(stage)
    assert sum(name.startswith("postroom_group_lag_messages{") for name in got) == 2
    assert got["postroom_groups_left_out"] == 2  # and nothing of a topic without groups


async def test_a_look_ends_in_time(stage: Stage) -> None:
    for group in ("a", "b"):
        await stage.post("/topics/orders/groups", {"group": group}, 201)
    ticks = iter(range(10_000))
    sample = await Sampler(stage.broker, clock=lambda: float(next(ticks))).sample()
    assert len(sample.lags) < 2 and sample.left_out > 0


async def test_a_scrape_works_while_the_store_is_away(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    await send(stage, "x")
    await stage.post("/topics/orders/groups", {"group": "billing"}, 201)
    assert (await scrape(stage))["postroom_group_lag_messages{group=billing,topic=orders}"] == 1

    def away() -> Any:
        raise StoreUnavailable("away")

    monkeypatch.setattr(stage.broker.store.catalog, "version", away)
    stage.app.state.metrics.sampler.last.taken_at -= 60
    text = (await stage.call("GET", "/metrics")).text
    assert 'postroom_group_lag_messages{group="billing",topic="orders"} 1.0' in text
    (age,) = re.findall(r"^postroom_groups_age_seconds (\S+)$", text, re.MULTILINE)
    assert float(age) >= 60


# ---- figures ----


def test_labels_are_bounded() -> None:
    tally, spread = Tally(), Spread()
    for n in range(2500):
        tally.add((f"t{n}", "g"))
        spread.add((f"t{n}",), 0.1)
    found = dict(tally.items())
    assert len(found) == 2001 and found[(OTHER, OTHER)] == 500
    assert len(spread.items()) == 2001


def test_names_are_folded() -> None:
    assert topic_label("orders.billing.dead") == topic_label("orders.billing.retry") == "orders"
    assert topic_label("_reply.host-1-abc") == "_reply"
    assert group_label("cache@ann") == "cache" and group_label("billing") == "billing"


def test_durations_fall_into_their_buckets() -> None:
    spread = Spread()
    for seconds in (0.0005, BOUNDS_S[0], 0.3, 100.0):
        spread.add(("x",), seconds)
    ((_, counts, total),) = spread.items()
    assert counts[0] == 2 and counts[BOUNDS_S.index(0.5)] == 1 and counts[-1] == 1
    assert sum(counts) == 4 and total == pytest.approx(100.3 + BOUNDS_S[0] + 0.0005)


def test_faults_have_outcomes_of_their_own() -> None:
    figures = Figures()
    for error in (None, ZeroDivisionError(), asyncio.CancelledError(), StoreFull("x")):
        figures.ended("append", 0.1, error)
    assert {outcome for (_, outcome), _ in figures.requests.items()} == {
        "ok", "unexpected", "cancelled", "store_full",
    }  # fmt: skip


# ---- the documentation and the examples ----


async def families(stage: Stage) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Kind and labels of everything there is, by the name that queries use."""
    found = {}
    for family in stage.app.state.metrics.collector.collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        found[name] = (family.type, family.labels)
    return found


async def test_the_page_names_every_metric_with_its_labels(stage: Stage) -> None:
    shown = {row[0].strip("`"): tuple(filter(None, row[1].split(", "))) for row in table(PAGE, "All metrics")}
    assert shown == {name: labels for name, (_, labels) in (await families(stage)).items()}


def named(query: str, known: dict[str, Any]) -> Iterator[str]:
    for name in re.findall(r"\bpostroom_\w+", query):
        base = re.sub(r"_(bucket|count|sum)$", "", name)
        yield base if base in known and known[base][0] == "histogram" else name


def queries() -> list[str]:
    rules = re.findall(r"^ +expr: (.+)$", RULES, re.MULTILINE)
    panels = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    assert len(rules) >= 12 and len(panels) >= 20
    return rules + panels


async def test_rules_and_dashboard_ask_for_metrics_and_labels_that_exist(stage: Stage) -> None:
    known = await families(stage)
    for family in (await App("memory://").metrics()).families:
        known[f"{family.name}_total" if family.type == "counter" else family.name] = (
            family.type,
            family.labels,
        )
    for query in queries():
        names = list(named(query, known))
        assert [name for name in names if name not in known] == [], query
        labels = {"le", "instance", "job"}.union(*(known[name][1] for name in names))
        used = {label for part in re.findall(r"by \(([^)]*)\)", query) for label in part.split(", ")}
        used |= set(re.findall(r"[{,](\w+)(?:=|!=|=~|!~)\"", query))
        assert used <= labels, query


def test_every_alert_is_explained() -> None:
    alerts = re.findall(r"^ +- alert: (\w+)$", RULES, re.MULTILINE)
    assert [row[0].strip("`") for row in table(PAGE, "Alerts")] == alerts
    assert RULES.count("summary:") == RULES.count("severity:") == len(alerts)
    for query in queries():
        assert query.count("(") == query.count(")") and query.count("{") == query.count("}")
