"""`make bench`: the table, and the goals beside it.

python -m bench [throughput|ops|latency|backlog|routes|fairness|lanes|requests|outbox|guards|spool|peers|
                 kafka|jobs|console|spark|audit|all]
                [--store sqlite|postgresql|mariadb|all] [--seconds 2] [--waiting 10000000] [--rows 1000000]
                [--json FILE]

`ops` is what one operation costs the processor, beside the same statements by hand and a row queue.
`peers` compares Postroom with other queues (Redis, NATS, RabbitMQ, Kafka) that `make peers` installed.
`kafka` compares the listener for Kafka clients with Kafka, both with confluent-kafka.
`jobs` is handlers a second beside Celery, dramatiq, arq and Procrastinate, and Celery on Postroom.
`console` is what the console costs a broker, and how fast it answers, with 1,000 topics of 5 groups each.
`spark` is the data pipeline beside Spark's Kafka source, if `make peers` installed that, and with the audit,
which `audit` runs alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from . import (
    backlog,
    fairness,
    guards,
    idle,
    kafka_clients,
    lanes,
    latency,
    ops,
    outbox,
    requests,
    routes,
    spool,
    throughput,
)
from .console import GOAL_MS, GOAL_PERCENT, ConsoleCost
from .console import run as measure_console
from .contenders import PostroomQueue, RowQueue
from .grounds import STORES, Ground, ground
from .jobs import run as jobs
from .measure import Latency, Throughput
from .peers import contenders, table
from .peers.run import run as run_contenders

console = Console(width=150)

PARTS = [
    *(
        "throughput",
        "ops",
        "latency",
        "backlog",
        "routes",
        "fairness",
        "lanes",
        "requests",
        "outbox",
        "guards",
    ),
    *("spool", "peers", "kafka", "jobs", "console", "spark", "audit", "all"),
]


async def run_throughput(where: Ground, seconds: float) -> list[Throughput]:
    results = []
    async for result in throughput.run(where.contenders, seconds=seconds):
        results.append(result)
        console.print(
            f"  {result.contender:34} {result.what:14} batch {result.batch:5} x{result.at_once:<3} "
            f"{result.size:5} B  {result.per_s:12,.0f}/s",
            style="dim",
        )
    console.print(_throughput_table(where.store, results))
    return results


def _throughput_table(store: str, results: list[Throughput]) -> Table:
    table = Table("what", "batch", "at once", "bytes", title=f"Throughput on {store}, every commit flushed")
    for name in ("postroom msg/s", "MB/s", "CPU s/1M"):
        table.add_column(name, justify="right")
    others = list(dict.fromkeys(r.contender for r in results if r.contender != PostroomQueue.name))
    for name in others:
        table.add_column(name, justify="right")
        table.add_column("ratio", justify="right")
    found = {(r.contender, r.what, r.batch, r.at_once, r.size): r for r in results}
    for ours in (r for r in results if r.contender == PostroomQueue.name):
        shape = (ours.what, ours.batch, ours.at_once, ours.size)
        cells = [f"{ours.per_s:,.0f}", f"{ours.mb_per_s:,.1f}", f"{ours.cpu_s_per_million:,.1f}"]
        for name in others:
            other = found[name, *shape]
            cells += [f"{other.per_s:,.0f}", f"{ours.per_s / other.per_s:,.1f}"]
        table.add_row(*map(str, shape), *cells)
    return table


async def run_ops(stores: Sequence[str], seconds: float) -> list[ops.Operation]:
    found = [one async for one in ops.in_memory(seconds)]
    for store in stores:
        with ground(store) as where:
            found += [one async for one in ops.on_store(where, seconds)]
    found += [one async for one in ops.beside_redis(seconds)]
    console.print(ops.table(found))
    return found


async def run_latency(seconds: float) -> list[Latency]:
    results = [await asyncio.to_thread(latency.bare_commit, seconds)]
    for make in (PostroomQueue, RowQueue):
        results.append(await latency.publish(make(), seconds))
    results.append(await latency.end_to_end(seconds))
    results += await latency.served(seconds)
    table = Table("contender", "what", title="Latency at a steady 1,000 messages a second")
    for name in ("p50 ms", "p99 ms", "max ms", "p99 / p99 of one flushed commit", "the broker, of a core"):
        table.add_column(name, justify="right")
    for r in results:
        ratio = r.p99_ms / results[0].p99_ms
        cpu = "" if r.cpu_percent is None else f"{r.cpu_percent:.0f}%"
        figures = f"{r.p50_ms:.2f}", f"{r.p99_ms:.2f}", f"{r.max_ms:.1f}", f"{ratio:.1f}", cpu
        table.add_row(r.contender, r.what, *figures)
    console.print(table)
    return results


def run_backlog(waiting: int) -> list[backlog.Backlog]:
    """Each backlog in a process of its own, so that memory is its own too."""
    results = []
    for count in (100_000, waiting):
        console.print(f"  publishing {count:,} messages, then consuming", style="dim")
        command = [sys.executable, "-m", "bench.backlog", str(count)]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        results.append(backlog.Backlog(**json.loads(output)))
    table = Table("waiting messages", title="Cost against backlog")
    for name in ("consume + ack msg/s", "peak memory MB", "ratio"):
        table.add_column(name, justify="right")
    for r in results:
        table.add_row(
            f"{r.waiting:,}", f"{r.per_s:,.0f}", f"{r.peak_mb:,.0f}", f"{r.per_s / results[0].per_s:.2f}"
        )
    console.print(table)
    return results


async def run_routes(where: Ground) -> routes.Pauses:
    found = await routes.run(where)
    table = Table("store", title="The longest wait of a send during a split or merge, without one beside it")
    for name in ("changes", "median ms", "worst ms", "p99 ms without", "a change takes ms", "goals"):
        table.add_column(name, justify="right")
    goals = f"{routes.GOAL_MEDIAN_MS} and {routes.GOAL_WORST_MS}: {'met' if found.good else 'missed'}"
    times = (found.median_ms, found.worst_ms, found.quiet_p99_ms, found.change_ms)
    table.add_row(found.store, str(found.changes), *(f"{ms:.1f}" for ms in times), goals)
    console.print(table)
    return found


def _tell(line: str) -> None:
    console.print(f"  {line}", style="dim", markup=False)


async def run_peers(seconds: float) -> dict[str, object]:
    found = await run_contenders(contenders.PEERS, seconds=seconds, told=_tell)
    results, commit = found.results, found.commit
    console.print(table.ways(results), style="dim", markup=False)
    console.print(table.speed_table(results))
    console.print(table.latency_table(results, commit))
    return {"contenders": [result.as_dict() for result in results], "one flushed commit": asdict(commit)}


def run_kafka(seconds: float) -> list[kafka_clients.Speed]:
    found = kafka_clients.run(seconds, told=_tell)
    shown = Table("broker", "what", title="Kafka clients: confluent-kafka, both brokers flushed")
    for name in ("size", "messages/s", "broker's CPU s per million", "client thread's"):
        shown.add_column(name, justify="right")
    for one in found:
        if one.size:
            used = f"{one.cpu_s:.2f}", f"{one.client_s:.2f}"
            shown.add_row(one.broker, one.what, f"{one.size} B", f"{one.per_s:,.0f}", *used)
    console.print(shown)
    for one in found:
        if not one.size:
            console.print(f"{one.broker}: {one.per_s:,.0f} {one.what} take {one.cpu_s:.1%} of a core")
    return found


async def run_fairness(where: Ground, seconds: float) -> list[fairness.Felt]:
    found = await fairness.run(where, seconds)
    title = f"A quiet producer (100 messages a second) and its consumer beside others, on {where.store}"
    table = Table("beside", title=title)
    for name in (
        "stored p50 ms",
        "p99 ms",
        "ratio",
        "allowed p99",
        "received p50 ms",
        "p99 ms",
        "others msg/s",
    ):
        table.add_column(name, justify="right")
    alone = found[0]
    for one in found:
        stored = (
            f"{one.stored_p50:.1f}",
            f"{one.stored_p99:.1f}",
            f"{one.stored_p99 / alone.stored_p99:.1f}",
        )
        received = (f"{one.received_p50:.1f}", f"{one.received_p99:.1f}")
        allowed = f"{one.allowed_p99(alone):.0f}"
        table.add_row(one.beside, *stored, allowed, *received, f"{one.others_per_s:,.0f}")
    console.print(table)
    return found


async def run_idle(where: Ground) -> list[idle.Idle]:
    found = [await idle.run(where, groups=groups, members=5000, seconds=20) for groups in (1, 100)]
    table = Table("groups", "members", title=f"Idle members on {where.store}, and one message after all")
    for name in ("transactions/s", "looks/s", "CPU %", "received by all groups ms", "looks for it"):
        table.add_column(name, justify="right")
    for one in found:
        rates = (f"{one.transactions_per_s:.1f}", f"{one.looks_per_s:.1f}", f"{one.cpu_percent:.0f}")
        table.add_row(str(one.groups), str(one.members), *rates, f"{one.received_ms:.1f}", str(one.looks))
    console.print(table)
    return found


async def run_requests(where: Ground, seconds: float) -> list[requests.RoundTrips]:
    found = await requests.run(where, seconds)
    table = Table("way", "topic", title=f"Requests and their replies on {where.store}")
    for name in ("at once", "round trips/s", "alone p50 ms", "p99 ms", "max ms"):
        table.add_column(name, justify="right")
    for one in found:
        times = (one.p50_ms, one.p99_ms, one.max_ms)
        rates = (str(one.at_once), f"{one.per_s:,.0f}")
        table.add_row(one.way, one.storage, *rates, *(f"{ms:.2f}" for ms in times))
    console.print(table)
    return found


async def run_console(where: Ground, seconds: float) -> ConsoleCost:
    found = await measure_console(where, seconds=seconds)
    shape = f"{found.topics:,} topics of {found.groups} groups, {found.viewers} viewers"
    table = Table("", title=f"The console on {where.store}: {shape}")
    for name in ("overview p50 ms", "slowest ms", "broker % of a core", "viewers add %"):
        table.add_column(name, justify="right")
    table.add_row("first after a start", "", f"{found.cold:.0f}", "", "")
    table.add_row(
        "quiet",
        *(f"{ms:.1f}" for ms in (found.quiet, found.quiet_max, found.idle_percent, found.viewers_percent)),
    )
    flow = (found.flowing, found.flowing_max, found.flow_percent, found.flow_viewers_percent)
    table.add_row("200 messages a second", *(f"{value:.1f}" for value in flow))
    console.print(table)
    goals = f"below {GOAL_MS} ms, and {GOAL_PERCENT} % for the viewers"
    console.print(f"goals: {goals}: {'met' if found.good else 'missed'}")
    return found


def run_spark(rows: int) -> dict[str, object]:
    from . import spark_beside, spark_section  # the others need no Spark

    found = spark_section.run(rows, _tell)
    console.print(spark_section.rates_table(found))
    console.print(spark_beside.table(found.beside))
    console.print(spark_section.goals_table(found))
    console.print(spark_section.audit_table(found.audit))
    return found.as_dict()


def run_audit() -> dict[str, object]:
    from . import spark_section

    found = spark_section.audit_alone(_tell)
    console.print(spark_section.audit_table(found))
    return asdict(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="?", default="all", choices=PARTS)
    parser.add_argument(
        "--store",
        default="all",
        choices=[*STORES, "all"],
        help="for throughput, ops, routes, fairness, requests, outbox, guards and console",
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="for each measurement")
    parser.add_argument("--waiting", type=int, default=10_000_000, help="the large backlog")
    parser.add_argument("--rows", type=int, default=1_000_000, help="for spark")
    parser.add_argument("--jobs", type=int, default=10_000, help="for jobs: how many each handles")
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args()
    figures: dict[str, object] = {}
    stores = STORES if args.store == "all" else (args.store,)
    if args.part in ("throughput", "all"):
        for store in stores:
            with ground(store) as where:
                results = asyncio.run(run_throughput(where, args.seconds))
            figures[f"throughput on {store}"] = [r.as_dict() for r in results]
    if args.part in ("ops", "all"):
        figures["ops"] = [asdict(one) for one in asyncio.run(run_ops(stores, args.seconds))]
    if args.part in ("latency", "all"):
        figures["latency"] = [asdict(r) for r in asyncio.run(run_latency(args.seconds * 2))]
    if args.part in ("backlog", "all"):
        figures["backlog"] = [asdict(r) for r in run_backlog(args.waiting)]
    if args.part in ("routes", "all"):
        for store in stores:
            with ground(store) as where:
                figures[f"routes on {store}"] = asdict(asyncio.run(run_routes(where)))
    if args.part in ("requests", "all"):
        for store in stores:
            with ground(store) as where:
                trips = asyncio.run(run_requests(where, args.seconds))
                figures[f"requests on {store}"] = [asdict(one) for one in trips]
    if args.part in ("outbox", "guards", "all"):
        for store in stores:
            with ground(store) as where:
                if args.part != "guards":
                    figures[f"outbox on {store}"] = outbox.show(where, args.seconds, 50_000)
                if args.part != "outbox":
                    figures[f"guards on {store}"] = guards.run(where)
    if args.part in ("lanes", "all"):
        figures["lanes"] = [asdict(one) for one in lanes.show(args.seconds * 2, console)]
    if args.part in ("spool", "all"):
        figures["spool"] = spool.show(100_000, args.seconds / 2)
    if args.part in ("kafka", "all"):
        figures["kafka"] = [asdict(one) for one in run_kafka(args.seconds)]
    if args.part in ("peers", "all"):
        figures["peers"] = asyncio.run(run_peers(args.seconds))
    if args.part in ("jobs", "all"):
        figures["jobs"] = jobs.show(args.jobs, console)
    if args.part in ("console", "all"):
        for store in stores:
            with ground(store) as where:
                cost = asyncio.run(run_console(where, max(15.0, args.seconds)))
                figures[f"console on {store}"] = asdict(cost)
    if args.part in ("fairness", "all"):
        for store in stores:
            with ground(store) as where:
                felt = asyncio.run(run_fairness(where, args.seconds * 2))
                figures[f"fairness on {store}"] = [asdict(one) for one in felt]
                figures[f"idle on {store}"] = [asdict(one) for one in asyncio.run(run_idle(where))]
    if args.part in ("spark", "all"):
        figures["spark"] = run_spark(args.rows)
    if args.part == "audit":
        figures["audit"] = run_audit()
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
