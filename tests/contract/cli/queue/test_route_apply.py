"""`postroom route apply`: what it shows, does, skips and refuses (R47)."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

import postroom
from postroom.cli.queue import route as command
from postroom.errors import StoreBusy
from postroom.model.split_plan_file import plan_to_text
from postroom.model.topology.split_plan import SplitPlan, make_plan
from tests.contract.cli_runner import Cli

LOADS = [8] * 256 + [0] * 512 + [8] * 256
"""Of four partitions two have everything."""


@pytest.fixture(params=["sqlite", "postgres", "mysql"])
def cli(request: pytest.FixtureRequest, tmp_path: Path) -> Cli:
    url = None if request.param == "sqlite" else request.getfixturevalue(f"{request.param}_url")
    cli = Cli(tmp_path, url)
    asyncio.run(_make(cli.url))
    return cli


@pytest.fixture
def here(tmp_path: Path) -> Cli:
    cli = Cli(tmp_path)
    asyncio.run(_make(cli.url))
    return cli


async def _make(url: str) -> None:
    async with postroom.connect(url, migrate=True) as mq:
        await mq.create_topic("orders", partitions=4)
        await mq.send_many("orders", [postroom.Message(b"%d" % n, key=str(n % 50)) for n in range(200)])


def plan_file(cli: Cli, **settings: Any) -> tuple[SplitPlan, str]:
    async def made() -> SplitPlan:
        async with postroom.connect(cli.url) as mq:
            return make_plan(
                await mq.route("orders"), LOADS, **{"merge_cold": True, "factor": 1.2, **settings}
            )

    plan = asyncio.run(made())
    path = cli.folder / "plan.json"
    path.write_text(plan_to_text(plan))
    return plan, str(path)


def ranges(cli: Cli) -> list[tuple[int, int]]:
    found = cli.ok("route", "show", "orders", "--json").json["partitions"]
    return [(p["first_slot"], p["last_slot"]) for p in found if not p["sealed"]]


@pytest.mark.slow("starts programs")
def test_a_plan_is_carried_out(cli: Cli) -> None:
    plan, path = plan_file(cli)
    assert [step.do for step in plan.steps].count("merge") == 1 and len(plan.steps) > 2
    before = ranges(cli)
    shown = cli.ok("route", "apply", path, "--dry-run").out
    assert "split slots 0-255 into" in shown and "merge slots 256-511 and 512-767" in shown
    assert "(dry run, nothing was changed)" in shown and ranges(cli) == before
    refused = cli("route", "apply", path)
    assert refused.code == 4 and "pass --yes" in refused.err and ranges(cli) == before
    done = cli.ok("route", "apply", path, "--yes")
    assert ranges(cli) == [(piece.first_slot, piece.last_slot) for piece in plan.after]
    total = len(plan.steps)
    assert f"step {total} of {total}: merge slots 256-511 and 512-767: partition " in done.out
    assert f"has {len(plan.after)} partitions now, version {total + 1} of its route" in done.out
    again = cli.ok("route", "apply", path, "--yes")
    assert f"all {total} steps of the plan are done already" in again.out
    assert len(cli.ok("read", "orders", "--json").lines) == 200


def test_for_scripts(here: Cli) -> None:
    plan, path = plan_file(here)
    would = here.ok("route", "apply", path, "--dry-run", "--json").json
    assert (would["dry_run"], would["steps"], would["done"]) == (True, len(plan.steps), 0)
    assert would["would"][0] == {"do": "split", "first_slot": 0, "last_slot": 255, "at": plan.steps[0].at}
    did = here.ok("route", "apply", path, "--yes", "--json").json
    assert (did["steps"], did["version"], len(did["ranges"])) == (
        len(plan.steps),
        len(plan.steps) + 1,
        len(plan.after),
    )
    assert here.ok("route", "apply", path, "--json").json["steps"] == 0


def test_it_goes_on_where_it_stopped(here: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, path = plan_file(here)
    real, calls = command._step, [0]

    async def fails_once(*arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:
            raise StoreBusy("locked for too long")
        return await real(*arguments)

    monkeypatch.setattr(command, "_step", fails_once)
    stopped = here("route", "apply", path, "--yes")
    assert stopped.code == 1
    assert (
        f"step 2 of {len(plan.steps)} failed: locked for too long. Steps 1 to 1 are done and stay so"
        in stopped.err
    )
    assert len(ranges(here)) == 5
    shown = here.ok("route", "apply", path, "--dry-run").out.splitlines()
    assert shown[2].split()[-1] == "done" and shown[3].split()[-2:] == ["to", "do"]
    here.ok("route", "apply", path, "--yes")
    assert calls[0] == 1 + len(plan.steps)
    assert ranges(here) == [(piece.first_slot, piece.last_slot) for piece in plan.after]


def test_a_plan_for_another_route_is_refused(here: Cli) -> None:
    _, path = plan_file(here)
    here.ok("route", "split", "orders", "3")
    for extra in ((), ("--dry-run",), ("--yes",)):
        refused = here("route", "apply", path, *extra)
        assert refused.code == 1 and len(ranges(here)) == 5
        assert "for version 1 of the route of topic 'orders'; version 2 was not made by it" in refused.err
        assert "make a new one with `postroom pipeline hotspots`" in refused.err
    later, _ = plan_file(here)
    assert later.version == 2
    here.ok("topic", "delete", "orders", "--yes")
    assert "there is no topic 'orders'" in here("route", "apply", path, "--yes").err
    asyncio.run(_make(here.url))
    refused = here("route", "apply", path, "--yes", "--json")
    assert refused.error["error"] == "route_conflict" and "that is at version 1" in refused.error["message"]


def test_a_topic_of_the_same_name_is_another_one(here: Cli) -> None:
    _, path = plan_file(here)
    here.ok("topic", "delete", "orders", "--yes")
    asyncio.run(_make(here.url))
    refused = here("route", "apply", path, "--yes")
    assert "the plan is for another topic 'orders'" in refused.err and len(ranges(here)) == 4


def test_what_is_no_plan(here: Cli) -> None:
    missing = here("route", "apply", "nothing.json", "--yes")
    assert missing.code == 2 and "the plan nothing.json cannot be read: No such file" in missing.err
    _, path = plan_file(here)
    fields = json.loads(Path(path).read_text())
    Path(path).write_text(json.dumps({**fields, "postroom_split_plan": 9}))
    assert "plan.json: the split plan has form 9" in here("route", "apply", path, "--yes").err


def test_nothing_to_do(here: Cli) -> None:
    _, path = plan_file(here, merge_cold=False, factor=50)
    assert "the load of topic orders is even as it is" in here.ok("route", "apply", path, "--yes").out
