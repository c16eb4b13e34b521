"""The outbox: messages written in the caller's own commits, how fast the relay sends them, and how soon.

python -m bench.outbox [--store sqlite|postgresql|mariadb] [--seconds 2] [--messages 50000] [--json FILE]

Beside plain sends to the same queue, in the same run. The queue is in a database of its own, or in the
outbox's: then a row is deleted by the transaction that stores its message. Every commit is flushed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import postroom
from postroom.client.databases import opening

from .grounds import STORES, Ground, ground
from .measure import percentile

__all__ = ["Relayed", "Soon", "Written", "relayed", "show", "soon", "written"]

SIZE = 100
KEYS = 1_000


@dataclass(frozen=True)
class Written:
    store: str
    what: str
    per_s: float  # messages


@dataclass(frozen=True)
class Relayed:
    store: str
    same_database: bool
    messages: int
    per_s: float  # from the outbox into the queue, deleted there


@dataclass(frozen=True)
class Soon:
    store: str
    same_database: bool
    p50_ms: float  # from the call of `send`, with the commit, until a consumer has the message
    p99_ms: float


def _shop(where: Ground, folder: Path) -> tuple[str, Any]:
    """The caller's database, with an outbox and a table of its own, flushed as a queue's is."""
    url = where.fresh(folder)
    connection = opening(url)()
    if where.store == "sqlite":
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
    postroom.Outbox().create_table(connection)
    connection.cursor().execute("CREATE TABLE shop_orders (id BIGINT PRIMARY KEY, item VARCHAR(100))")
    return url, connection


async def written(where: Ground, seconds: float) -> list[Written]:
    """Transactions of one connection, one after the other; and plain sends, for comparison."""
    value, outbox = os.urandom(SIZE // 2).hex().encode(), postroom.Outbox()
    with tempfile.TemporaryDirectory(prefix="postroom-bench-") as folder:
        _, connection = _shop(where, Path(folder))
        mark = "?" if where.store == "sqlite" else "%s"
        insert = f"INSERT INTO shop_orders VALUES ({mark}, 'lamp')"
        number = 0

        def order(messages: int) -> int:
            nonlocal number
            number += 1
            with outbox.transaction(connection):
                connection.cursor().execute(insert, (number,))
                for at in range(messages):
                    outbox.send(connection, "bench", value, key=str((number + at) % KEYS))
            return messages or 1

        found = [
            Written(
                where.store, "an order of the caller's alone, and commit", _per_s(lambda: order(0), seconds)
            ),
            Written(where.store, "the order, a message, and commit", _per_s(lambda: order(1), seconds)),
            Written(where.store, "the order, 100 messages, and commit", _per_s(lambda: order(100), seconds)),
        ]
        connection.close()
        (Path(folder) / "queue").mkdir()
        async with postroom.connect(where.fresh(Path(folder) / "queue"), migrate=True) as mq:
            await mq.create_topic("bench")
            for at_once in (1, 100):
                rate = await _plain(mq, value, at_once, seconds)
                found.append(Written(where.store, f"mq.send, {at_once} at once", rate))
    return found


def _per_s(work: Callable[[], int], seconds: float) -> float:
    done, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        done += work()
    return done / (time.perf_counter() - began)


async def _plain(mq: postroom.Connection, value: bytes, at_once: int, seconds: float) -> float:
    done, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        await asyncio.gather(*(mq.send("bench", value, key=str(at)) for at in range(at_once)))
        done += at_once
    return done / (time.perf_counter() - began)


async def relayed(where: Ground, messages: int, *, same: bool) -> Relayed:
    value, outbox = os.urandom(SIZE // 2).hex().encode(), postroom.Outbox()
    with tempfile.TemporaryDirectory(prefix="postroom-bench-") as folder:
        url, connection = _shop(where, Path(folder))
        async with postroom.connect(_queue(where, Path(folder), url, same), migrate=True) as mq:
            await mq.create_topic("bench")
            with outbox.transaction(connection):
                some = [postroom.Message(value, key=str(at % KEYS)) for at in range(messages)]
                outbox.send_many(connection, "bench", some)
            began = time.perf_counter()
            async with outbox.relay(mq, url) as relay:
                while relay.forwarded < messages:  # noqa: ASYNC110 — the relay has no such event
                    await asyncio.sleep(0.005)
                took = time.perf_counter() - began
        connection.close()
    return Relayed(where.store, same, messages, messages / took)


async def soon(where: Ground, samples: int, *, same: bool) -> Soon:
    """One transaction after the other, in a thread; each is waited for."""
    outbox, found = postroom.Outbox(), list[float]()
    with tempfile.TemporaryDirectory(prefix="postroom-bench-") as folder:
        url, connection = _shop(where, Path(folder))
        connection.close()
        async with postroom.connect(_queue(where, Path(folder), url, same), migrate=True) as mq:
            await mq.create_topic("bench")
            async with outbox.relay(mq, url), mq.consumer("bench", group="bench", ack="after") as consumer:
                writer = asyncio.create_task(asyncio.to_thread(_orders, outbox, url, samples))
                for _ in range(samples):
                    message = await anext(consumer)
                    found.append(time.time() - float(message.value))
                await writer
    return Soon(where.store, same, percentile(found, 50) * 1000, percentile(found, 99) * 1000)


def _orders(outbox: postroom.Outbox, url: str, samples: int) -> None:
    connection = opening(url)()
    for _ in range(samples):
        with outbox.transaction(connection):
            outbox.send(connection, "bench", b"%.6f" % time.time())
        time.sleep(0.01)
    connection.close()


def _queue(where: Ground, folder: Path, shop: str, same: bool) -> str:
    if same:
        return shop
    (folder / "queue").mkdir()
    return where.fresh(folder / "queue")


# ---- the program ----


def show(where: Ground, seconds: float, messages: int) -> list[dict[str, object]]:
    results: list[Written | Relayed | Soon] = [*asyncio.run(written(where, seconds))]
    for same in (False, True):
        results.append(asyncio.run(relayed(where, messages, same=same)))
        results.append(asyncio.run(soon(where, 200, same=same)))
    for result in results:
        print(result, flush=True)
    return [asdict(result) for result in results]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="bench.outbox", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", default="sqlite", choices=STORES)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each measurement")
    parser.add_argument("--messages", type=int, default=50_000, help="that wait for the relay")
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args()
    with ground(args.store) as where:
        figures = show(where, args.seconds, args.messages)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
