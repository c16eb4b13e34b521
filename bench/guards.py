"""What a guard costs per message: `python -m bench.guards [sqlite|postgresql|mariadb …]` (R33).

A handler that changes one row and commits, without a guard and with each, in turn, one message at a time on
one connection. Two figures: the time until the commit begins, which is what a guard adds to (its statements),
and the whole with the flushed commit. Beside them the queue's own ack, and the ack in the handler's
transaction, where the queue is in the same database.
"""

from __future__ import annotations

import asyncio
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import postroom
from postroom import guards
from postroom.address import parse
from postroom.client.consumer.opened import Browsed
from postroom.client.message import Received

from .grounds import STORES, Ground, ground

MESSAGES, ROUNDS = 60, 5
RULES = {("on", "off"): "off", ("off", "on"): "on", (None, "on"): "on"}
_DELIVERED = Browsed("orders", 0, 1, 1)

Took = dict[str, list[tuple[float, float]]]


def connected(url: str) -> Any:
    address = parse(url)
    if address.kind == "sqlite":
        connection = sqlite3.connect(str(address.path))
        connection.execute("PRAGMA journal_mode = WAL")
        return connection
    if address.kind == "postgresql":
        import psycopg

        return psycopg.connect(address.dsn)
    import pymysql

    return pymysql.connect(**dict(address.server))


def prepare(connection: Any) -> None:
    cursor = connection.cursor()
    cursor.execute("CREATE TABLE counts (name VARCHAR(20) PRIMARY KEY, number BIGINT)")
    cursor.execute("INSERT INTO counts VALUES ('orders', 0)")
    guards.create_tables(connection)
    connection.commit()


def message(number: int) -> Received:
    headers = {"version": b"%d" % number, "event": b"on" if number % 2 else b"off"}
    return Received(b"x", b"42", headers, "", None, None, number, number, None, _DELIVERED, number)


Guard = Callable[[Any, Received], Any] | None

GUARDS: dict[str, Guard] = {
    "no guard": None,
    "once": lambda connection, one: guards.once(connection, one, scope="bench"),
    "newest": lambda connection, one: guards.newest(connection, one, scope="bench"),
    "in_sequence": lambda connection, one: guards.in_sequence(connection, one, scope="bench"),
    "transitions": lambda connection, one: guards.transitions(connection, one, rules=RULES, scope="bench"),
}


def handle(connection: Any, guard: Guard, one: Received) -> tuple[float, float]:
    """Seconds until the commit, and with it."""
    begin = time.perf_counter()
    if guard is None:
        _work(connection)
    else:
        with guard(connection, one) as decided:
            assert decided, "each of these is to be handled"
            for _ in decided if isinstance(decided, guards.Ready) else (one,):
                _work(connection)
    worked = time.perf_counter() - begin
    connection.commit()
    return worked, time.perf_counter() - begin


def _work(connection: Any) -> None:
    connection.cursor().execute("UPDATE counts SET number = number + 1")


def guarded(url: str) -> Took:
    connection = connected(url)
    prepare(connection)
    took: Took = {name: [] for name in GUARDS}
    number = 0
    for _ in range(ROUNDS):
        for _ in range(MESSAGES):
            number += 1
            for name, guard in GUARDS.items():
                took[name].append(handle(connection, guard, message(number)))
    connection.close()
    return took


async def acked(url: str) -> Took:
    """The queue's own ack after the commit, and the ack in the transaction."""
    took: Took = {"then ack()": [], "ack(connection=)": []}
    connection = connected(url)
    joins = parse(url).kind != "sqlite"
    async with postroom.connect(url, migrate=True) as mq:
        await mq.create_topic("orders")
        await mq.send_many("orders", [postroom.Message(b"x") for _ in range(4 * MESSAGES)])
        async with mq.consumer("orders", group="bench") as consumer:
            for number in range(4 * MESSAGES):
                one = await anext(consumer)
                begin = time.perf_counter()
                _work(connection)
                if joins and number % 2:
                    await one.ack(connection=connection)
                worked = time.perf_counter() - begin
                connection.commit()
                if not joins or not number % 2:
                    await one.ack()
                name = "ack(connection=)" if joins and number % 2 else "then ack()"
                took[name].append((worked, time.perf_counter() - begin))
    connection.close()
    return took


def show(store: str, took: Took) -> None:
    plain = [statistics.median(side) * 1e6 for side in zip(*took["no guard"], strict=True)]
    print(f"{store:12} {'µs, medians':18} {'until commit':>14} {'added':>8} {'with commit':>14} {'added':>8}")
    for name, times in took.items():
        if times:
            worked, whole = (statistics.median(side) * 1e6 for side in zip(*times, strict=True))
            added = worked - plain[0], whole - plain[1]
            print(f"{'':12} {name:18} {worked:14,.0f} {added[0]:8,.0f} {whole:14,.0f} {added[1]:8,.0f}")


def run(where: Ground) -> dict[str, float]:
    """Prints a table; returns the medians until the commit, in microseconds."""
    with tempfile.TemporaryDirectory() as folder:
        url = where.fresh(Path(folder))
        took = guarded(url) | asyncio.run(acked(url))
    show(where.store, took)
    return {
        name: statistics.median(worked for worked, _ in times) * 1e6 for name, times in took.items() if times
    }


def main(*stores: str) -> None:
    for store in stores or STORES:
        with ground(store) as where:
            run(where)


if __name__ == "__main__":
    main(*sys.argv[1:])
