"""A served broker in a process of its own, that says what each callback of its loop has cost.

    python -m tests.integration.wire.hostile_broker FILE

Prints a line of JSON when it is served. Then each line on its standard input is a command, answered by a line
of JSON: `mark` (what the loop and the memory did since the last one), `renew` (the attacker's own topic is as
at the beginning), `figures` (all that belongs to the victim), `end`. To see that the probes see something:
`block` the loop, `hold` memory, `harm` the victim.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import sys
import threading
import time
from asyncio import events
from dataclasses import asdict
from pathlib import Path
from typing import Any

import postroom
from postroom.broker.access import Gatekeeper, new_token
from postroom.broker.broker import Broker
from postroom.clock import SystemClock
from postroom.endpoint.values import PollRequest
from postroom.model.access import Principal, hash_of, parse_permissions
from postroom.model.policy.settings import GroupWish
from postroom.wire.server.listening import Listening
from postroom.wire.server.server import WireServer

RIGHTS = {
    "nobody": (),
    "sender": ("send:mine",),
    "consumer": ("consume:mine",),
    "manager": ("manage:mine",),
    "owner": ("send:mine", "consume:mine", "manage:mine"),
}


class Probe:
    """The greatest CPU time of the loop's thread in one callback: other processes do not count."""

    def __init__(self) -> None:
        self.worst_ms, self.what, self.asked = 0.0, "", False
        run = events.Handle._run

        def measured(handle: Any) -> None:
            begun = time.thread_time()
            run(handle)
            took = (time.thread_time() - begun) * 1000
            if threading.current_thread() is not threading.main_thread():
                return
            if self.asked:  # that was the very callback that asked
                self.asked = False
            elif took > self.worst_ms:
                self.worst_ms, self.what = took, str(handle)[:300]

        events.Handle._run = measured  # type: ignore[method-assign]

    def take(self) -> dict[str, Any]:
        found = {"worst_ms": self.worst_ms, "what": self.what, **_memory()}
        self.worst_ms, self.what, self.asked = 0.0, "", True
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
        return found


def _memory() -> dict[str, int]:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {"rss_kb": int(lines["VmRSS"].split()[0]), "peak_kb": int(lines["VmHWM"].split()[0])}


async def victim(mq: postroom.Connection, broker: Broker) -> None:
    """Something of everything: settled, held, dead, stopped, delayed, staged, limited."""
    await mq.create_topic("victim", partitions=2)
    await mq.limit_rate(topic="victim", messages_per_s=10_000)
    await mq.create_group("victim", "vg", lease="24h")
    await mq.create_group("victim", "vo", mode="ordered", lease="24h", exhausted="stop", max_attempts=1)
    for number in range(20):
        await mq.send("victim", b"%d" % number, key=str(number))
    await mq.send("victim", b"later", delay="20h", id="later")
    async with mq.consumer("victim", group="vg") as consumer:
        messages = await consumer.poll(max_messages=8, wait=10)
        await messages[0].dead("no")
        await consumer.ack(messages[1:4])
    async with mq.consumer("victim", group="vo") as ordered:
        (first, *_) = await ordered.poll(max_messages=1, wait=10)
        await first.retry()
    await broker.subscribe("victim", "vg", GroupWish(), "vm", "victim")
    await broker.poll(PollRequest("victim", "vg", "vm", 4242, 5, 1 << 20, 0, True))
    await broker.subscribe("victim", "vo", GroupWish(), "vm", "victim")
    await broker.poll(PollRequest("victim", "vo", "vm", 4343, 5, 1 << 20, 0, True))
    staging = mq.staging("nightly")
    segment = staging.segment("one")
    await segment.add("victim", [postroom.Message(b"staged", key="s")])
    await staging.commit([await segment.close()])


async def renew(mq: postroom.Connection, broker: Broker) -> dict[str, Any]:
    """The attacker's topic, with messages and a group that has some of them in its hands."""
    if "mine" not in [topic.name for topic in await mq.topics()]:
        await mq.create_topic("mine", partitions=1, exist_ok=True)
    if "mg" not in [group.name for group in await mq.groups("mine")]:
        await mq.create_group("mine", "mg")
        for number in range(10):
            await mq.send("mine", b"%d" % number)
        await broker.poll(PollRequest("mine", "mg", "m", 77, 5, 1 << 20, 0, True))
    route = await broker.route("mine")
    return {"partition_id": route.ranges[0].partition_id, "partition": route.ranges[0].partition}


async def figures(mq: postroom.Connection, broker: Broker) -> dict[str, Any]:
    """Without what changes by itself: rates, ages, moments."""
    found: dict[str, Any] = {"topics": sorted(t.name for t in await mq.topics() if "mine" not in t.name)}
    for name in ("victim", "victim.vg.dead"):
        info = await broker.topic(name)
        route = await broker.route(name)
        found[name] = (asdict(info), asdict(route.ranges[0]), route.version)
    for group in await broker.groups("victim"):
        members = [(member.name, member.client) for member in group.members]
        found[group.name] = (asdict(group.settings), group.paused, group.generation, members)
        lag = await broker.lag("victim", group.name)
        found[f"lag of {group.name}"] = [
            (p.partition, p.committed, p.end, p.messages, p.unsettled, p.stopped, p.parked, p.holder)
            for p in lag.partitions
        ]
        letters = await broker.dead_letters("victim", group.name, 1000)
        found[f"letters of {group.name}"] = [one.open for one in letters]
        stopped = await broker.stopped("victim", group.name, 1000)
        found[f"stopped of {group.name}"] = [(one.partition_id, one.offset, one.reason) for one in stopped]
    found["marks"] = await broker.staged_marks(("victim",), "nightly")
    found["decided"] = asdict(await broker.publish_staged(("victim",), "nightly", 0))
    found["rates"] = [(rate.kind, rate.topic, rate.messages_per_s) for rate in await broker.rates()]
    return found


async def main(url: str) -> None:
    probe = Probe()
    async with postroom.connect(url) as mq:
        broker = mq._endpoint
        assert isinstance(broker, Broker)
        tokens = {name: new_token() for name in RIGHTS}
        for name, allowed in RIGHTS.items():
            broker.store.access.add(Principal(name, parse_permissions(allowed)), hash_of(tokens[name]))
        await victim(mq, broker)
        own = await renew(mq, broker)
        gatekeeper = Gatekeeper(broker.store, broker.in_thread, SystemClock())
        server = WireServer(broker, Listening(port=0), gatekeeper)
        await server.start()
        places = [piece.partition_id for piece in (await broker.route("victim")).ranges]
        gc.collect()
        gc.freeze()
        _say({"port": server.port, "tokens": tokens, "places": places, **own})
        loop = asyncio.get_running_loop()
        while (command := (await loop.run_in_executor(None, sys.stdin.readline)).strip()) not in ("", "end"):
            if command == "mark":
                gc.collect()
                _say(probe.take())
            elif command == "block":
                loop.call_soon(_block, 0.1)
                _say({})
            elif command == "hold":
                _say(await asyncio.to_thread(lambda: len(b"x" * (100 << 20))))
            elif command == "harm":
                _say((await mq.send("victim", b"harm")).offset)
            else:
                _say(await {"renew": renew, "figures": figures}[command](mq, broker))
                probe.take()  # what that cost is nobody's fault
        await server.stop(grace_ms=1000)


def _block(seconds: float) -> None:
    begun = time.thread_time()
    while time.thread_time() - begun < seconds:
        pass


def _say(what: Any) -> None:
    print(json.dumps(what, default=repr), flush=True)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    asyncio.run(main(sys.argv[1]))
