"""`postroom route …`: the picture, the deeds, the refusals; and what `lag` says after a change."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import postroom
from postroom import Connection
from postroom.broker.broker import Broker
from postroom.broker.duties import Retention
from postroom.cli.queue import route_picture as picture
from postroom.config import DEFAULTS
from postroom.model.topology import route as routes
from postroom.model.topology.route import Range, Route
from tests.contract.cli_runner import Answer, Cli
from tests.tuned import Tune


@pytest.fixture(params=["sqlite", "postgres", "mysql"])
def cli(request: pytest.FixtureRequest, tmp_path: Path) -> Cli:
    """Topic orders: two partitions, eight messages in each; groups billing, which is ordered, and stats."""
    url = None if request.param == "sqlite" else request.getfixturevalue(f"{request.param}_url")
    cli = Cli(tmp_path, url)
    asyncio.run(_fill(cli.url))
    return cli


@pytest.fixture
def here(tmp_path: Path) -> Cli:
    """The same, on a file."""
    cli = Cli(tmp_path)
    asyncio.run(_fill(cli.url))
    return cli


async def _fill(url: str) -> None:
    async with postroom.connect(url, migrate=True) as mq:
        await mq.create_topic("orders", partitions=2)
        await mq.create_group("orders", "billing", mode="ordered")
        await mq.create_group("orders", "stats")
        for slot in range(0, 1024, 64):
            await mq.send("orders", b"%d" % slot, slot=slot)


def _ranges(cli: Cli) -> list[tuple[int, int, int]]:
    found = cli.ok("route", "show", "orders", "--json").json["partitions"]
    return [(p["partition"], p["first_slot"], p["last_slot"]) for p in found if not p["sealed"]]


# --- changes -----------------------------------------------------------------------------------------


def test_split_and_merge_in_the_picture(cli: Cli) -> None:
    """R25, R26: what opened, what it follows, who has still to read what."""
    changed = cli.ok("route", "split", "orders", "0", "--at", "128", "--json").json
    assert (changed["sealed"], changed["version"]) == ([0], 2) and changed["took_ms"] > 0
    assert [(p["partition"], p["first_slot"], p["last_slot"]) for p in changed["opened"]] == [
        (2, 0, 127),
        (3, 128, 511),
    ]
    said = cli.ok("route", "merge", "orders", "1", "3").out
    assert said.startswith(
        "merged partitions 1 and 3 of topic orders into 4 (slots 128-1023, shard first) in "
    )
    shown = cli.ok("route", "show", "orders", "--json", "--versions").json
    assert (shown["version"], shown["change"]) == (3, None)
    assert [(p["partition"], p["sealed"], p["follows"], p["followed_by"]) for p in shown["partitions"]] == [
        (2, False, [0], []),
        (4, False, [1, 3], []),
        (0, True, [], [2, 3]),
        (1, True, [], [4]),
        (3, True, [0], [4]),
    ]
    assert [p["end"] for p in shown["partitions"]] == [0, 0, 9, 9, 1]  # with the control batch of the seal
    assert [[r["partition"] for r in v["ranges"]] for v in shown["versions"]] == [[0, 1], [2, 3, 1], [2, 4]]
    billing, stats = shown["groups"]
    assert {p["partition"]: p["messages"] for p in billing["to_read"]} == {0: 8, 1: 8, 3: 0}
    assert {p["partition"]: p["waits_for"] for p in billing["waiting"]} == {2: [0], 3: [0], 4: [1, 3]}
    assert [p["partition"] for p in stats["to_read"]] == [0, 1, 3] and stats["waiting"] == []


def test_the_picture_as_text(here: Cli) -> None:
    before = here.ok("route", "show", "orders").out
    assert "version 1" in before and "has to read" not in before  # nothing to tell about groups
    here.ok("route", "split", "orders", "0")
    said = here.ok("route", "show", "orders", "--versions").out
    assert "█" * 8 + "·" * 24 in said and "░" * 16 + "·" * 16 in said
    assert "0 → 2, 3" in said and "2 for 0; 3 for 0" in said
    assert "2 (0-255), 3 (256-511), 1 (512-1023)" in said
    only = here.ok("route", "show", "orders", "--group", "stats").out
    assert "stats" in only and "billing" not in only and "version  partitions" not in only


def test_read_to_the_end_nothing_waits(here: Cli) -> None:
    here.ok("route", "split", "orders", "0")
    assert len(here.read_all("orders", "billing")) == 16
    (billing,) = here.ok("route", "show", "orders", "--group", "billing", "--json").json["groups"]
    assert (billing["to_read"], billing["waiting"]) == ([], [])


def test_a_dry_run_changes_nothing(here: Cli) -> None:
    said = here.ok("route", "split", "orders", "0", "--dry-run").out
    assert "as it is" in said and "nothing was changed" in said and "new, new" in said
    shown = here.ok("route", "merge", "orders", "0", "1", "--dry-run", "--json").json
    assert shown["dry_run"] and shown["sealed"] == [0, 1] and shown["after"]["version"] == 2
    assert [(r["partition"], r["last_slot"]) for r in shown["after"]["ranges"]] == [(None, 1023)]
    assert _ranges(here) == [(0, 0, 511), (1, 512, 1023)]
    assert here.ok("route", "show", "orders", "--json").json["version"] == 1


@pytest.mark.slow("starts programs")
@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["really", "dry"])
@pytest.mark.parametrize(
    ("words", "code", "hint"),
    [
        (["split", "orders", "0", "--at", "600"], 2, "choose 1 to 511"),
        (["split", "orders", "7"], 1, "it has 0, 1"),
        (["split", "oders", "0"], 1, "did you mean orders?"),
        (["merge", "orders", "0", "0"], 2, "name one of its neighbours"),
        (["move", "orders", "0"], 2, "name one with --shard NAME=URL"),
        (["move", "orders", "0", "--to", "b"], 2, "--shard b=URL"),
        (["move", "orders", "0", "--to", "first"], 2, "is on that shard already"),
    ],
)
def test_bad_wishes_change_nothing(here: Cli, words: list[str], dry: list[str], code: int, hint: str) -> None:
    answer = here("route", *words, *dry)
    assert answer.code == code and hint in answer.err and "Traceback" not in answer.err
    assert _ranges(here) == [(0, 0, 511), (1, 512, 1023)]


def test_strangers_are_not_merged(here: Cli) -> None:
    here.ok("route", "split", "orders", "0")
    answer = here("route", "merge", "orders", "2", "1", "--json")
    assert answer.code == 2 and answer.error["error"] == "invalid_setting"
    assert "neighbours of partition 2 are 3" in answer.error["message"]


def test_a_sealed_partition_and_an_unknown_group(here: Cli) -> None:
    here.ok("route", "split", "orders", "0")
    assert "is sealed" in here("route", "split", "orders", "0").err
    answer = here("route", "show", "orders", "--group", "biling")
    assert answer.code == 1 and "biling" in answer.err


# --- a change under way ------------------------------------------------------------------------------


async def _leave_a_change(mq: Connection) -> None:
    """As if whoever made it had died after the first step."""
    assert isinstance(mq._endpoint, Broker)
    mq._endpoint.store.routes.begin(routes.split(await mq._endpoint.route("orders"), 0))


def test_a_change_under_way_is_shown_and_refuses_others(here: Cli, tune: Tune) -> None:
    tune(broker={"change_idle_ms": 10**9})  # else whoever finds it finishes it
    asyncio.run(_begin_and_look(here))


async def _begin_and_look(cli: Cli) -> None:
    async with postroom.connect(cli.url) as mq:
        await _leave_a_change(mq)
        shown, said, dry, refused = await asyncio.to_thread(_look, cli)
    change = shown.json["change"]
    assert (change["kind"], change["version"], change["seals"]) == ("split", 2, [0])
    assert [(p["partition"], p["first_slot"]) for p in change["opens"]] == [(2, 0), (3, 256)]
    assert "under way: split of 0 into 2 (0-255) and 3 (256-511), for version 2" in said.out
    assert "under way" in dry.err and dry.code == 0
    assert refused.code == 1 and refused.error["error"] == "route_conflict"


def _look(cli: Cli) -> tuple[Answer, ...]:
    return (
        cli.ok("route", "show", "orders", "--json"),
        cli.ok("route", "show", "orders"),
        cli("route", "merge", "orders", "0", "1", "--dry-run"),
        cli("route", "merge", "orders", "0", "1", "--json"),
    )


# --- lag ---------------------------------------------------------------------------------------------


def _parts(cli: Cli, group: str) -> dict[int, Any]:
    (lag,) = cli.ok("lag", "orders", group, "--json").json
    return {part["partition"]: (part["sealed"], part["waits_for"]) for part in lag["partitions"]}


def test_lag_names_what_is_sealed_and_what_waits(cli: Cli) -> None:
    assert "state" not in cli.ok("lag", "orders", "billing").out
    cli.ok("route", "split", "orders", "0")
    assert _parts(cli, "billing") == {0: (True, []), 1: (False, []), 2: (False, [0]), 3: (False, [0])}
    assert _parts(cli, "stats") == {0: (True, []), 1: (False, []), 2: (False, []), 3: (False, [])}
    heading, *rows, total = cli.ok("lag", "orders", "billing").out.splitlines()
    assert heading.split()[-1] == "state" and total.split()[0] == "all"
    states = {row.split()[0]: row for row in rows}
    assert states["0"].split()[-1] == "sealed" and states["1"].split()[-1] == "open"
    assert states["2"].rstrip().endswith("open, waits for 0")


# --- the bars ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [(0,), (0, 1), (0, 31, 33, 512), (0, 1023), tuple(range(0, 1024, 3))])
def test_bars_of_a_route_cover_it(cuts: tuple[int, ...]) -> None:
    """Each cell is somebody's, every partition has one, and whole cells are one's alone."""
    edges = [*cuts, 1024]
    pieces = tuple(Range(edges[n], edges[n + 1] - 1, n, n + 1) for n in range(len(cuts)))
    bars = [row[2] for row in picture.rows(Route("orders", 1, pieces), {}, 200)]
    assert all(bar.strip("·") for bar in bars) and {len(bar) for bar in bars} == {32}
    for cell in range(32):
        column = [bar[cell] for bar in bars if bar[cell] != "·"]
        assert column == ["█"] or (len(column) >= 2 and set(column) == {"▌"})


# --- what is gone ------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", ["sqlite", "postgres", "mysql"])
async def test_lag_right_after_a_sealed_partition_is_removed(
    store: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """R43: the route that is remembered may still name a partition whose table retention has just dropped."""
    url = f"sqlite:///{tmp_path}/q.db" if store == "sqlite" else request.getfixturevalue(f"{store}_url")
    await _fill(url)
    async with postroom.connect(url) as mq:
        await mq.alter_topic("orders", drop_settled=True)
        await mq.delete_group("orders", "billing")
        await mq.split("orders", 0)
        async with mq.consumer("orders", "stats") as consumer, asyncio.timeout(20):
            while (await mq.lag("orders", "stats")).partitions[0].sealed:
                await consumer.ack(await consumer.poll(wait=0.1))
        assert isinstance(mq._endpoint, Broker)
        await mq.route("orders")  # is remembered
        await asyncio.to_thread(Retention(mq._endpoint.store, DEFAULTS).run_once)
        lag = await mq.lag("orders", "stats")
        assert sorted(part.partition for part in lag.partitions) == [1, 2, 3]
