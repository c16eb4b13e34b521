"""What the processes of a world do: send, consume, change the route. Plain programs on the public API.

They note what they do in the world's history before and after they do it. An error that Postroom says may be
tried again is; any other ends the world.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import postroom
from postroom import Received
from postroom.testing.check import Did, Event

from .plan import Group, Plan, Sender
from .world import World

__all__ = [
    "TOPIC",
    "Notes",
    "Sending",
    "change",
    "connected",
    "consume",
    "is_ready",
    "passes",
    "produce",
    "serve",
]

TOPIC = "orders"
_REASON = "its value says so"


@dataclass
class Notes:
    """What all processes noted, and how far the senders are."""

    world: World
    plan: Plan
    events: list[Event] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)  # by sender: over all its runs
    done: set[str] = field(default_factory=set)
    confirmed: set[str] = field(default_factory=set)
    settled: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))  # by group
    staged: dict[tuple[str, int], list[postroom.Message]] = field(default_factory=dict)  # by sender and batch
    ready: bool = False  # the topic and its groups are made
    mended: bool = False  # what failed again and again does not any more
    die: Callable[[str], None] = lambda me: None  # the process of this name is killed
    shards: Mapping[str, str] | None = None  # whoever has the files open, has these open, too

    def shards_of(self, url: str) -> Mapping[str, str] | None:
        return self.shards if url.startswith("sqlite:") else None

    def note(self, did: Did, by: str = "", id: str = "", **more: Any) -> None:
        self.events.append(Event(self.world.now_ns, did, by, id, topic=TOPIC, **more))
        if did == "confirmed":
            self.confirmed.add(id)
        elif did == "settled":
            self.settled[more["group"]].add(id)
        where = f" at {more['partition']}:{more['offset']}" if more.get("offset", -1) >= 0 else ""
        whom = f" {by}" if did in ("killed", "paused") else ""
        self.world.trace(f"{did}{whom} {id}{where}" + (f" for {more['group']}" if more.get("group") else ""))


def passes(error: postroom.PostroomError) -> bool:
    """Whether a patient program tries again."""
    return error.retriable or isinstance(error, postroom.StoreFull)


async def connected(notes: Notes, url: str) -> postroom.Connection:
    while True:
        try:
            return await postroom.connect(url, shards=notes.shards_of(url))
        except postroom.PostroomError as error:
            if not passes(error):
                raise
            notes.world.trace(f"cannot connect: {error.code}")
        await asyncio.sleep(0.2)


async def is_ready(notes: Notes) -> None:
    while not notes.ready:  # noqa: ASYNC110 - set in another loop
        await asyncio.sleep(0.01)


# ---- sending ----


async def produce(notes: Notes, sender: Sender, me: str, url: str) -> None:
    await is_ready(notes)
    mq = await connected(notes, url)
    await Sending(notes, sender, me, mq).run()
    notes.done.add(sender.name)
    await mq.close()


class Sending:
    _keys = ""  # its keys begin with this; "": they are those of all

    def __init__(self, notes: Notes, sender: Sender, me: str, mq: postroom.Connection) -> None:
        self._notes, self._sender, self._me, self._mq = notes, sender, me, mq
        self._draw = notes.world.draw

    @cached_property
    def _producer(self) -> postroom.Producer:
        largest = 1 if self._sender.way == "stream" else int(self._draw.choice((1, 2, 4)))
        return self._mq.producer(TOPIC, batch_messages=largest)

    async def run(self) -> None:
        sender, notes = self._sender, self._notes
        while notes.sent.get(sender.name, 0) < sender.messages or (sender.name, 0) in notes.staged:
            try:
                await self._some()
            except postroom.PostroomError as error:
                if not passes(error) and not isinstance(error, postroom.UnknownFate):
                    raise
                notes.world.trace(f"not sent: {error.code}")
                await asyncio.sleep(0.05)
            await asyncio.sleep(sender.pause_s * self._draw.random())

    async def _some(self) -> None:
        way = self._sender.way
        if way == "send":
            (message,) = self._messages(1)
            receipt = await self._mq.send(
                TOPIC, message.value, key=message.key, delay=message.delay, timeout=8
            )
            self._confirmed(message, receipt)
        elif way == "ids":
            await self._until_stored()
        elif way == "staged":
            await self._stage()
        elif way == "many":
            messages = self._messages(3)
            receipts = await self._mq.send_many(TOPIC, messages, timeout=8)
            for message, receipt in zip(messages, receipts, strict=True):
                self._confirmed(message, receipt)
        else:
            await self._post()

    async def _until_stored(self) -> None:
        """Send one under its id, and again if it is not known what became of it, also after a kill."""
        sender, notes = self._sender, self._notes
        unsure = notes.staged.get((sender.name, 0)) or self._messages(1)
        (message,) = notes.staged[sender.name, 0] = unsure
        receipt = await self._mq.send(
            TOPIC, message.value, key=message.key, id=bytes(message.value).decode(), delay=message.delay,
            timeout=2,
        )  # fmt: skip
        self._confirmed(message, receipt)
        del notes.staged[sender.name, 0]

    async def _stage(self) -> None:
        """A batch of a job that is run again until it is published, also by the next process."""
        sender, notes = self._sender, self._notes
        batch = notes.sent.get(sender.name, 0) // 3
        messages = notes.staged.get((sender.name, batch))
        if messages is None:
            messages = notes.staged[sender.name, batch] = self._messages(3)
            notes.sent[sender.name] -= len(messages)
        staging = self._mq.staging(sender.name, batch, timeout=5)
        segment = staging.segment()
        await segment.add(TOPIC, messages)
        await staging.commit([await segment.close()])
        for message in messages:
            notes.note("confirmed", self._me, bytes(message.value).decode())
        notes.sent[sender.name] += len(messages)
        notes.staged.pop((sender.name, 0), None)

    async def _post(self) -> None:
        """In a stream each is a batch, which leaves while those before it are under way."""
        posted = []
        for message in self._messages(6):
            how: dict[str, Any] = {"key": message.key, "delay": message.delay}
            posted.append((message, await self._producer.post(message.value, **how)))
            if self._sender.way == "stream":
                await asyncio.sleep(2 * self._notes.plan.flush_s * self._draw.random())
        failed: postroom.PostroomError | None = None
        for message, future in posted:
            try:
                self._confirmed(message, await future)
            except postroom.PostroomError as error:
                failed = error
        if failed is not None:
            raise failed

    def _messages(self, most: int) -> list[postroom.Message]:
        sender, notes, found = self._sender, self._notes, []
        for _ in range(min(most, sender.messages - notes.sent.get(sender.name, 0))):
            number = notes.sent[sender.name] = notes.sent.get(sender.name, 0) + 1
            key = f"{self._keys}k{int(self._draw.random() * sender.keys)}" if sender.keys else None
            later = sender.delay_s and self._draw.random() < 0.5
            later = later and not (self._keys and notes.plan.steps)  # it counts by their own wall clock
            delay = round(sender.delay_s * self._draw.random(), 3) if later else 0
            fate = self._fate()
            id = f"{sender.name}-{number}-{fate}"
            due = self._due(delay)
            order = "" if delay or key is None else key
            notes.note("sending", self._me, id, key=order, due=due)
            found.append(postroom.Message(id.encode(), key=key, delay=delay or None))
        return found

    def _due(self, delay: float) -> int:
        """When it may come at the earliest; clocks are read in whole milliseconds."""
        if not delay or self._notes.plan.steps:
            return 0
        return self._notes.world.now_ns + int((delay - 0.002) * 1e9)

    def _fate(self) -> str:
        plan, drawn = self._notes.plan, self._draw.random()
        if drawn < plan.poison:
            return "kill"
        if drawn >= plan.bad:
            return "ack"
        return ("retry", "dead", "fail")[int(self._draw.random() * 3)]

    def _confirmed(self, message: postroom.Message, receipt: postroom.Receipt) -> None:
        at: dict[str, int] = {}
        if receipt.offset is not None and receipt.partition is not None and receipt.due is None:
            at = {"partition": receipt.partition, "offset": receipt.offset}
        self._notes.note("confirmed", self._me, bytes(message.value).decode(), **at)


# ---- consuming ----


async def consume(notes: Notes, group: Group, me: str, url: str) -> None:
    await is_ready(notes)
    mq = await connected(notes, url)
    while True:
        try:
            await _Consuming(notes, group, me, mq).run()
        except postroom.PostroomError as error:
            if not passes(error):
                raise
            notes.world.trace(f"cannot consume: {error.code}")
            await asyncio.sleep(0.05)


class _Consuming:
    def __init__(self, notes: Notes, group: Group, me: str, mq: postroom.Connection) -> None:
        self._notes, self._group, self._me = notes, group, me
        self._draw = notes.world.draw
        self._broadcast = group.mode == "broadcast"
        member = {"member": me.partition("#")[0]} if self._broadcast else {}
        window = int(self._draw.choice((2, 50)))
        self._consumer = mq.consumer(TOPIC, group=group.name, window=window, **member)  # type: ignore[arg-type]
        self._name = f"{group.name}@{member['member']}" if self._broadcast else group.name

    async def run(self) -> None:
        async with self._consumer as consumer:
            while True:
                most = self._draw.choice((1, 3, 100))
                messages = await consumer.poll(max_messages=most, wait=1)
                await self._settle(await self._handle(messages))

    async def _handle(self, messages: list[Received]) -> list[Received]:
        """Returns those that were handled; behind one that was given back its key waits.

        All are noted before anything is awaited: a process that is stopped later had them before.
        """
        returned: dict[bytes | None, tuple[Received, bool]] = {}
        done: list[Received] = []
        for message in messages:
            id = message.value.decode()
            fails = not self._broadcast and self._fails(id, message.attempt)
            line = self._line(message)
            if line in returned:
                continue
            if id.endswith("kill") and not self._broadcast and not self._notes.mended:
                return await self._die(id)
            if fails or self._draw.random() < 0.02:
                returned[line] = (message, fails)
            else:
                self._note("handled", id)
                done.append(message)
        for message, fails in returned.values():
            await self._return(message, fails)
        if self._group.slow_s:
            await asyncio.sleep(self._group.slow_s * self._draw.random())
        return done

    async def _die(self, id: str) -> list[Received]:
        """Poison: whatever else this member has been given goes back when its lease ends (I14)."""
        self._note("condemned", id)
        self._notes.die(self._me)
        await asyncio.Event().wait()
        return []

    def _fails(self, id: str, attempt: int) -> bool:
        if id.endswith("fail") and not self._notes.mended:
            self._note("condemned", id)  # after its last attempt it is a dead letter, or stopped
            return True
        return id.endswith("retry") and attempt < 3

    def _line(self, message: Received) -> bytes | None:
        """What has to wait for each other; without a key, a message stands for itself."""
        if self._group.mode == "ordered" and self._group.order == "partition":
            return b"%d" % message.partition
        return message.key if self._group.mode == "ordered" and message.key is not None else message.value

    def _note(self, did: Did, id: str) -> None:
        self._notes.note(did, self._me, id, group=self._name)

    async def _return(self, message: Received, fails: bool) -> None:
        try:
            await self._patiently(
                lambda: message.retry(delay=0.05, reason=_REASON) if fails else message.release()
            )
        except postroom.LeaseLost:
            pass

    async def _settle(self, done: list[Received]) -> None:
        together: dict[int, list[Received]] = {}
        for message in done:
            if message.value.endswith(b"dead") and not self._broadcast:
                self._note("condemned", message.value.decode())
                await self._noted([message], lambda one=message: one.dead(_REASON))  # type: ignore[misc]
            elif self._draw.random() < 0.3:
                await self._noted([message], message.ack)
            else:
                together.setdefault(message.partition, []).append(message)
        for messages in together.values():
            await self._noted(messages, lambda some=messages: self._consumer.ack(some))  # type: ignore[misc]

    async def _noted(self, messages: list[Received], settle: Callable[[], Awaitable[None]]) -> None:
        gone: set[int] = set()
        try:
            await self._patiently(settle)
        except postroom.LeaseLost as error:
            gone = set(error.details["offsets"])
        for message in messages:
            self._note("gone" if message.offset in gone else "settled", message.value.decode())

    async def _patiently(self, settle: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                return await settle()
            except postroom.StoreError as error:
                if not passes(error):
                    raise
                await asyncio.sleep(0.02)


# ---- brokers, and the route ----


async def serve(notes: Notes, path: str, host: str, port: int, kafka: int | None = None) -> None:
    """`kafka`: the port for Kafka clients."""
    mq = await connected(notes, path)
    while True:
        try:
            await mq.serve(host, port, kafka=kafka)
            break
        except postroom.PostroomError as error:
            if not passes(error):
                raise
            await asyncio.sleep(0.2)
    notes.world.trace(f"serves at {port}")
    await asyncio.Event().wait()


async def change(notes: Notes, me: str, url: str) -> None:
    """Change the route as often as the plan says, over all runs."""
    await is_ready(notes)
    mq, draw = await connected(notes, url), notes.world.draw
    while notes.sent.get("changes", 0) < notes.plan.changes:
        await asyncio.sleep(draw.random())
        notes.sent["changes"] = notes.sent.get("changes", 0) + 1
        try:
            await _change(notes, mq)
        except (postroom.RouteConflict, postroom.UnknownPartition) as error:
            notes.world.trace(f"not changed: {error.code}")
        except postroom.StoreError as error:
            if not passes(error):
                raise
            notes.world.trace(f"not changed: {error.code}")
    notes.done.add("changer")
    await mq.close()


async def _change(notes: Notes, mq: postroom.Connection) -> None:
    route, draw = await mq.route(TOPIC), notes.world.draw
    pieces = len(route.ranges)
    kinds = ("split", "merge") if pieces > 1 else ("split",)
    kind = draw.choice((*kinds, "move", "move") if notes.plan.sharded else kinds)
    at = int(draw.random() * (pieces - (kind == "merge")))
    notes.world.trace(f"begins to {kind} partition {route.ranges[at].partition}")
    if kind == "split":
        await mq.split(TOPIC, route.ranges[at].partition)
    elif kind == "move":
        shard = "first" if route.ranges[at].shard == "b" else "b"
        await mq.move(TOPIC, route.ranges[at].partition, shard=shard)
    else:
        await mq.merge(TOPIC, route.ranges[at].partition, route.ranges[at + 1].partition)
    notes.world.trace("changed the route")
