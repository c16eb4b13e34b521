"""A client with a token, and whatever it may say: every operation, with hostile sizes, ranges and names.

The broker is a process of its own. Of each request: its loop is not blocked for more than 50 ms of its own
time, its memory grows by less than four times the frame (and some slack), nothing of another principal
changes, and no traceback is logged. The requests are made from the operations' types (`hostile_values`), so
that new ones are covered by themselves. `POSTROOM_HOSTILE=all` sends every one of them with every right.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from postroom.endpoint.operations import OPERATIONS, Operation
from postroom.model.messages.batch import BatchBuilder
from postroom.wire import messages as m
from tests.integration.wire.hostile_broker import RIGHTS
from tests.integration.wire.hostile_values import World, hostile, sound
from tests.integration.wire.wire_raw import CANCEL, ERROR, HELLO, REPLY, Raw

EVERYTHING = os.environ.get("POSTROOM_HOSTILE") == "all"
SAMPLE = {"owner": 25}  # of each operation, requests of somebody with more rights than it takes; and
REFUSALS = 6  # of those with another right, or none
BLOCKED_MS = 50
SLACK_KB = 24 * 1024  # caches of the database, threads' stacks, what Python keeps for later
ANSWER_S = 60
WAITS_S = 0.2
LARGE = 64 * 1024
REFUSED = ("protocol", "not_authenticated", "invalid_name", "invalid_setting", "message_too_large")

ASKED = [m.LIST_BROKERS, *OPERATIONS.values()]
ENTITLED = {"send": "sender", "consume": "consumer", "manage": "manager", "any": "owner", "none": "nobody"}


@pytest.fixture(params=["sqlite", "postgres", "mysql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/queue.db"
    found: str = request.getfixturevalue(f"{request.param}_ready")
    return found


class Broker:
    """The process, and what it is asked."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path, told: dict[str, Any]) -> None:
        self._process, self.log = process, log
        self.port, self.tokens, self.places = told["port"], told["tokens"], told["places"]
        self.own = told

    async def ask(self, command: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{command}\n".encode())
        line = await asyncio.wait_for(self._process.stdout.readline(), ANSWER_S)
        assert line, f"the broker is gone: {self.log.read_text()[-3000:]}"
        return json.loads(line)

    def world(self, *more: str) -> World:
        own = {
            "topic": "mine", "name": "mine", "group": "mg", "member": "m", "client": "attacker", "token": 77,
            "partition_id": self.own["partition_id"], "partition_ids": [self.own["partition_id"]],
            "topics": ["mine"], "query": "own", "wait_ms": 0, "due_at": 0, "first": 5, "last": 6,
            "messages": 1, "bytes": 1000, "max_messages": 1, "max_bytes": 1000, "limit": 10, "partitions": 1,
            "batch": 0, "number": 0, "delay_ms": 0, "lane_messages": 0, "repeated": False, "ids": b"",
            "exist_ok": True,
        }  # fmt: skip
        names = ("victim", "vg", "vo", "vm", "victim.vg.dead", "victim.vg.retry", "_reply.x", *more)
        return World(own, names, (*self.places, 4242, 4343))


@asynccontextmanager
async def running(tmp_path: Path, url: str = "") -> AsyncIterator[Broker]:
    log = tmp_path / "log"
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.integration.wire.hostile_broker", url or f"sqlite:///{tmp_path}/queue.db",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=errors, limit=1 << 20,
        )  # fmt: skip
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), ANSWER_S)
        assert line, log.read_text()[-3000:]
        yield Broker(process, log, json.loads(line))
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


# ---- what is sent ----

_Said = tuple[str, bytes, bytes]
"""What it is, the header and the body."""


def a_batch() -> bytes:
    builder = BatchBuilder()
    builder.append(1, b"k", b"v", [])
    return builder.build()


def requests_of(operation: Operation, world: World) -> Iterator[_Said]:
    own = dict(world.own)
    if operation.name.endswith("_shard"):
        own["name"] = "first"
    elif operation.request.__struct_fields__[:2] == ("topic", "name"):
        own["name"] = "mg"
    world = World(own, world.others_names, world.others_numbers)
    body = a_batch() if operation.body else b""
    plain = msgspec.msgpack.encode(sound(operation.request, world))
    yield "sound", plain, body
    for label, value in hostile(operation.request, world):
        yield label, msgspec.msgpack.encode(value), body
    most = operation.request.most_bytes
    yield "a header that is too long", plain + bytes(most), body
    yield "nothing but nils", b"\xdd" + (most - 5).to_bytes(4) + b"\xc0" * (most - 5), body
    for size in (0, 1 << 20):
        yield f"a body of {size}", plain, b"\xff" * size


def chosen(operation: Operation, who: str, found: list[_Said]) -> list[_Said]:
    if EVERYTHING or who == ENTITLED[operation.need]:
        return found
    some = random.Random(f"{operation.kind}{who}")
    return some.sample(found, min(SAMPLE.get(who, REFUSALS), len(found)))


class Attacker:
    """One principal, and its connection; a new one whenever the broker ended it."""

    def __init__(self, broker: Broker, who: str) -> None:
        self._broker, self.who = broker, who
        self._way: Any = None
        self._raw: Raw | None = None
        self.answers: dict[str, int] = {}

    async def say(self, kind: int, header: bytes, body: bytes) -> str:
        """The code of the error that it is answered with, "ok", or "closed"."""
        if self._raw is None:
            self._way = Raw.open(self._broker.port, token=self._broker.tokens[self.who])
            self._raw = await self._way.__aenter__()
        try:
            self._raw.send(kind, header, body=body)
            code = await self._answer()
        except (ConnectionError, asyncio.IncompleteReadError):
            await self.leave()
            code = "closed"
        self.answers[code] = self.answers.get(code, 0) + 1
        return code

    async def _answer(self) -> str:
        assert self._raw is not None
        answer = asyncio.ensure_future(self._raw.receive())
        done, _ = await asyncio.wait([answer], timeout=WAITS_S)
        if not done:  # it may wait for messages
            self._raw.send(CANCEL, [2], id=0)
        came = await asyncio.wait_for(answer, ANSWER_S)
        if came.flags != REPLY | ERROR:
            return "ok"
        if came.code == "protocol":
            await self.leave()
        return came.code

    async def leave(self) -> None:
        if self._raw is not None:
            self._raw = None
            await self._way.__aexit__(None, None, None)


# ---- what is asserted ----


async def measured(broker: Broker, before: dict[str, Any], frame: int, label: str) -> dict[str, Any]:
    now: dict[str, Any] = await broker.ask("mark")
    assert now["worst_ms"] < BLOCKED_MS, f"{label}: the loop was blocked: {now}"
    grown = now["peak_kb"] - before["rss_kb"]
    assert grown < 4 * frame // 1024 + SLACK_KB, f"{label}: {grown} KB of memory for a frame of {frame} bytes"
    return now


async def attack(
    broker: Broker, operation: Operation, attackers: dict[str, Attacker], *names: str
) -> dict[str, Any]:
    """Everything that is to be said of one operation, by everybody: large frames one by one."""
    broker.own.update(await broker.ask("renew"))
    found = list(requests_of(operation, broker.world(*names)))
    before = await broker.ask("mark")
    worst: dict[str, Any] = before
    small: dict[str, list[_Said]] = {}
    for who, attacker in attackers.items():
        for label, header, body in chosen(operation, who, found):
            size = len(header) + len(body)
            if size < LARGE:
                small.setdefault(who, []).append((label, header, body))
                continue
            await attacker.say(operation.kind, header, body)
            said = f"{operation.name} by {who}, {label}"
            worst = max(worst, await measured(broker, before, size, said), key=lambda one: one["worst_ms"])

    async def each(who: str) -> None:
        for _, header, body in small.get(who, ()):
            await attackers[who].say(operation.kind, header, body)

    await asyncio.gather(*map(each, attackers))
    after = await measured(broker, before, LARGE, operation.name)
    return max(worst, after, key=lambda one: one["worst_ms"])


@pytest.mark.slow("hundreds of requests, each of them as hostile as can be")
async def test_no_request_hurts_anybody_else(tmp_path: Path, url: str) -> None:
    """Every operation, with each single right and with none (R48)."""
    async with running(tmp_path, url) as broker:
        attackers = {who: Attacker(broker, who) for who in RIGHTS}
        was = await broker.ask("figures")
        worst: dict[str, Any] = {}
        for operation in ASKED:
            worst[operation.name] = await attack(broker, operation, attackers)
            now = await broker.ask("figures")
            assert now == was, f"{operation.name} changed what is the victim's"
            assert "Traceback" not in broker.log.read_text(), f"{operation.name}: {_traceback(broker.log)}"
        for attacker in attackers.values():
            await attacker.leave()
            assert attacker.answers.get("permission_denied", 0) > 10 or attacker.who == "owner"
            assert attacker.answers.get("invalid_name", 0) > 10
            assert "broker" not in attacker.answers, "an error that nobody has foreseen"
        assert attackers["owner"].answers["ok"] > 100
        slowest = sorted(worst.items(), key=lambda one: -one[1]["worst_ms"])[:5]
        print([(name, round(one["worst_ms"], 1), one["what"][:80]) for name, one in slowest])
        print({who: attacker.answers for who, attacker in attackers.items()})


@pytest.mark.slow("breaks connections for seconds")
async def test_no_request_decides_for_anothers_job(tmp_path: Path, url: str) -> None:
    """A job's name is known to people, and stands in logs: it is no secret (I20)."""
    async with running(tmp_path, url) as broker:
        attackers = {"sender": Attacker(broker, "sender")}
        was = await broker.ask("figures")
        for operation in ASKED:
            if "query" in operation.request.__struct_fields__:
                await attack(broker, operation, attackers, "nightly", "one")
                assert await broker.ask("figures") == was, operation.name
        await attackers["sender"].leave()


async def test_what_is_asserted_can_be_seen(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        quiet = await broker.ask("mark")
        await measured(broker, quiet, 0, "nothing")
        await broker.ask("block")
        with pytest.raises(AssertionError, match="the loop was blocked"):
            await measured(broker, quiet, 0, "a loop that is blocked")
        await broker.ask("hold")
        with pytest.raises(AssertionError, match="KB of memory"):
            await measured(broker, quiet, 0, "memory")
        was = await broker.ask("figures")
        assert await broker.ask("figures") == was
        await broker.ask("harm")
        assert await broker.ask("figures") != was


@pytest.mark.slow("breaks connections for seconds")
async def test_no_greeting_hurts_anybody(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        world = broker.world()
        before = await broker.ask("mark")
        for label, value in hostile(m.Hello, World({}, world.others_names, ())):
            header = msgspec.msgpack.encode(value)
            async with Raw.open(broker.port, hello=False) as raw:
                if len(header) < LARGE - 100:
                    raw.send(HELLO, header)
                    assert (await raw.refused()).code in REFUSED, label
        await measured(broker, before, LARGE, "Hello")
        assert "Traceback" not in broker.log.read_text(), _traceback(broker.log)


def _traceback(log: Path) -> str:
    text = log.read_text()
    return text[text.index("Traceback") - 200 :][:3000]


@pytest.mark.slow("breaks connections for seconds")
def test_every_operation_is_covered() -> None:
    """By what a sound request is: one that its broker could not read would test nothing."""
    world = World({"token": 7}, (), ())
    for operation in ASKED:
        m.decode(msgspec.msgpack.encode(sound(operation.request, world)), operation.request)
        assert len(list(hostile(operation.request, world))) >= len(operation.request.__struct_fields__)


@pytest.mark.parametrize("need", sorted({one.need for one in ASKED}))
def test_every_right_has_an_attacker(need: str) -> None:
    assert ENTITLED[need] in RIGHTS
