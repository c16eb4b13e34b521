"""What a change costs: the same work on two source trees in turn, embedded and served, as ratios.

    git worktree add ../old v1.2.3
    python -m bench.before_after ../old/src --rounds 6

Each turn is a process of its own with the tree on its path: lists of 1,000 messages with keys and without,
single ones, consuming, and there and back. Medians over the rounds; the processor time of the client and of
the broker is measured beside the rate. Which tree goes first alternates, for machines are noisy.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

import postroom
from postroom import Connection, Message

__all__ = ["main"]

_LISTS, _LIST, _SINGLE, _BACK = 300, 1_000, 3_000, 400
_SENT = 2 * _LISTS * _LIST + _SINGLE
_VALUE = b"x" * 100
_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None  # a disk would be what is measured

Figures = dict[str, float]


class _Turn:
    """Measures one way to the queue; `broker` is the process that serves it, if one does."""

    def __init__(self, mq: Connection, way: str, broker: int | None) -> None:
        self._mq, self._way, self._broker = mq, way, broker
        self.figures: Figures = {}

    async def everything(self) -> None:
        await self._mq.create_topic("t", partitions=1)
        await self._mq.create_group("t", "g")
        keyed = [Message(_VALUE, key=f"k{number % 100}") for number in range(_LIST)]
        for what, many in (("lists", keyed), ("lists without keys", [Message(_VALUE)] * _LIST)):
            await self._measure(what, _LISTS * _LIST, self._repeated(_LISTS, self._mq.send_many, "t", many))
        await self._measure("single", _SINGLE, self._repeated(_SINGLE, self._send))
        await self._measure("consume", _SENT, self._consume())
        await self._measure("there and back", _BACK, self._back())

    async def _send(self) -> None:
        await self._mq.send("t", _VALUE, key="k")

    async def _repeated(self, times: int, what: Callable[..., Awaitable[object]], *args: object) -> None:
        for _ in range(times):
            await what(*args)

    async def _consume(self) -> None:
        left = _SENT
        async with self._mq.consumer("t", "g") as consumer:
            while left:
                found = await consumer.poll(1_000)
                await consumer.ack(found)
                left -= len(found)

    async def _back(self) -> None:
        async with self._mq.consumer("t", "g") as consumer:
            for _ in range(_BACK):
                await self._send()
                while not (found := await consumer.poll(10)):
                    pass
                await consumer.ack(found)

    async def _measure(self, what: str, messages: int, work: Awaitable[None]) -> None:
        gc.collect()  # 20 ms, or a tenth of the shortest: whether it falls into that is luck
        began, client, broker = time.perf_counter(), time.process_time(), self._broker_s()
        await work
        name = f"{self._way}: {what}"
        self.figures[f"{name}, messages/s"] = messages / (time.perf_counter() - began)
        self.figures[f"{name}, client µs"] = (time.process_time() - client) / messages * 1e6
        if self._broker is not None:
            self.figures[f"{name}, broker µs"] = (self._broker_s() - broker) / messages * 1e6

    def _broker_s(self) -> float:
        if self._broker is None:
            return 0.0
        fields = Path(f"/proc/{self._broker}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@asynccontextmanager
async def _broker(folder: Path) -> AsyncIterator[tuple[str, int]]:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    words = ("-u", f"sqlite:///{folder}/served.db", "serve", "--dev", "--port", str(port), "--http-port", "0")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "postroom", *words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield f"postroom://127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        await process.wait()


async def _reached(url: str) -> Connection:
    async with asyncio.timeout(30):
        while True:
            try:
                return await postroom.connect(url)
            except postroom.PostroomError:
                await asyncio.sleep(0.1)


async def turn() -> Figures:
    """One turn, with the tree of this process."""
    found: Figures = {}
    with tempfile.TemporaryDirectory(dir=_MEMORY) as name:
        async with _broker(Path(name)) as (url, pid):
            for way, address, broker in (
                ("served", url, pid),
                ("embedded", f"sqlite:///{name}/embedded.db", None),
            ):
                async with await _reached(address) as mq:
                    one = _Turn(mq, way, broker)
                    await one.everything()
                found.update(one.figures)
    return found


def _run(source: Path) -> Figures:
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join([str(source), root])  # the tree first: this file is the same for both
    done = subprocess.run(
        [sys.executable, "-m", "bench.before_after", "--turn"],
        env={**os.environ, "PYTHONPATH": path},
        cwd=tempfile.gettempdir(),
        stdout=subprocess.PIPE,
        check=True,
    )
    found: Figures = json.loads(done.stdout)
    return found


def compare(old: Path, new: Path, rounds: int, console: Console) -> None:
    turns: dict[Path, list[Figures]] = {old: [], new: []}
    for number in range(rounds):
        for source in (old, new) if number % 2 == 0 else (new, old):
            console.print(f"round {number + 1} of {rounds}: {source}", highlight=False)
            turns[source].append(_run(source))
    table = Table("figure", "before", "after", "ratio", title=f"medians of {rounds} rounds")
    for name in turns[old][0]:
        before, after = (statistics.median(one[name] for one in turns[source]) for source in (old, new))
        table.add_row(name, f"{before:,.1f}", f"{after:,.1f}", f"{after / before:.2f}" if before else "–")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.before_after", description="Compare two trees.")
    own = Path(__file__).resolve().parents[1] / "src"
    parser.add_argument("old", type=Path, nargs="?", help="the folder src of the tree before the change")
    parser.add_argument("new", type=Path, nargs="?", default=own, help="and after it (default: this one)")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--turn", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.turn:
        print(json.dumps(asyncio.run(turn())))
    elif given.old is None or not (given.old / "postroom").is_dir():
        parser.error(f"{given.old}: name the folder src of the tree before the change")
    elif given.rounds < 1:
        parser.error(f"--rounds {given.rounds}: at least 1")
    else:
        compare(given.old.resolve(), given.new.resolve(), given.rounds, Console())


if __name__ == "__main__":
    main()
