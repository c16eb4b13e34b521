"""One seed, from its plan to the verdict: faults first, then heal, then everything must finish.

The director starts the processes, does to them what the plan says, starts again what was killed, and in the
end waits until all is settled; it reads the log and the dead letters, and the checkers judge.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import postroom
from postroom.testing import check

from .disk import Disk
from .forwarding import own_database, relay, spool
from .kafka_member import member
from .loop import run_process
from .network import Network
from .plan import DISK, SHARD, SPOOL, Fault, Group, Plan, Sender, plan_of
from .roles import TOPIC, Notes, change, connected, consume, produce, serve
from .world import Process, World

__all__ = ["Outcome", "play"]

_PORT, _KAFKA_PORT = 7070, 9092
_LAZY_NS = 10**15  # SQLite flushes what it wrote lazily at some later checkpoint: here, never by itself
_FINISH_S = 300.0
_NO_DEAD_LETTERS = ("broadcast", "kafka")
_POISON_S = 4.0  # so long a poisonous message kills; a lease or two, again and again
_FRESH_S = 1.5  # a route is not older than this
_UNNOTED_S = 1.0  # until it is asked for what nobody has noted as settled
_RECONNECT_S = 1.0  # until whoever was connected to a broker has found another, or the same again


@dataclass
class Outcome:
    seed: int
    faults: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    digest: int = 0
    steps: int = 0
    simulated_s: float = 0.0
    cpu_s: float = 0.0
    troubles: list[str] = field(default_factory=list)  # what was done to it
    kinds: list[str] = field(default_factory=list)  # what took part
    confirmed: int = 0
    handled: int = 0


@dataclass
class _Job:
    name: str
    machine: str
    main: Callable[[str], Coroutine[Any, Any, None]]
    process: Process | None = None
    runs: int = 0
    lasts: bool = False  # it has an end of its own

    @property
    def serves(self) -> bool:
        return self.name.startswith("broker")


class Director:
    def __init__(self, world: World, plan: Plan, disks: dict[str, Disk]) -> None:
        """`disks` are those of the machines: one has the queue's files, others have spools and outboxes."""
        self.world, self.plan, self.disks = world, plan, disks
        disk = self.disk = disks[DISK]
        self.network: Network = world.network  # type: ignore[attr-defined]
        self.path = f"sqlite:///{disk.path}"
        brokers = ",".join(f"{DISK}:{_PORT + n}" for n in range(plan.served))
        self.served = f"postroom://{brokers}"
        self.notes = Notes(world, plan, die=self._die)
        if plan.sharded:
            self.notes.shards = {"b": f"sqlite:///{disk.folder / SHARD}"}
        self.jobs: list[_Job] = []
        self.troubles: list[str] = []
        self.innocent: list[str] = []  # stopped, though nothing was wrong with them
        self.healed = False

    @property
    def _lasting(self) -> set[str]:
        """Those that have an end of their own."""
        return {job.name for job in self.jobs if job.lasts}

    # ---- processes ----

    def _hire(self) -> None:
        plan, notes = self.plan, self.notes
        for number in range(plan.served):
            port = _PORT + number
            kafka = _KAFKA_PORT + number if plan.kafka else None
            main = partial(serve, notes, self.path, DISK, port, kafka)
            self._add(f"broker{number}", DISK, lambda me, main=main: main())
        for sender in plan.senders:
            self._hire_sender(sender)
        for group in plan.groups:
            for number in range(group.members):
                self._hire_member(group, number)
        if plan.changes:
            self._hire_one("changer", partial(change, notes), lasts=True)

    def _hire_sender(self, sender: Sender) -> None:
        """The relays of an outbox are where its database is."""
        mains: dict[str, Callable[..., Any]] = {"spool": spool, "outbox": own_database}
        main, (machine, url) = mains.get(sender.way, produce), self._place()
        self._add(sender.name, machine, lambda me: main(self.notes, sender, me, url), lasts=True)
        for number in range(sender.relays):
            self._add(f"{sender.name}r{number}", machine, lambda me: relay(self.notes, sender, me, url))

    def _hire_member(self, group: Group, number: int) -> None:
        name = f"{group.name[0]}{number}"
        if group.mode != "kafka":
            return self._hire_one(name, partial(consume, self.notes, group))
        brokers = [(DISK, _KAFKA_PORT + broker) for broker in range(self.plan.served)]
        machine = f"127.0.1.{1 + int(self.world.draw.random() * self.plan.machines)}"
        self._add(name, machine, lambda me: member(self.notes, group, me, brokers))

    def _hire_one(self, name: str, main: Callable[[str, str], Any], *, lasts: bool = False) -> None:
        machine, url = self._place()
        self._add(name, machine, lambda me: main(me, url), lasts=lasts)

    def _place(self) -> tuple[str, str]:
        """Some machine, through the brokers; some have the files open beside them."""
        if self.plan.served and self.world.draw.random() < 0.8:
            return f"127.0.1.{1 + int(self.world.draw.random() * self.plan.machines)}", self.served
        return DISK, self.path

    def _add(self, name: str, machine: str, main: Callable[[str], Any], *, lasts: bool = False) -> None:
        job = _Job(name, machine, main, lasts=lasts)
        self.jobs.append(job)
        self._start(job)

    def _start(self, job: _Job) -> None:
        job.runs += 1
        me = f"{job.name}#{job.runs}"
        process = job.process = self.world.process(me, job.machine)
        process.on_death.append(lambda: self.disks[job.machine].close_of(process))
        run_process(self.world, process, lambda: job.main(me))

    def _kill(self, job: _Job, again_s: float) -> None:
        process = job.process
        assert process is not None
        if not process.alive or (job.lasts and job.name in self.notes.done):
            return
        self.notes.note("killed", process.name)
        if job.serves:
            self._cut_off(job, again_s + _RECONNECT_S)
        self.world.kill(process)
        self.world.call_later(again_s, lambda: self._start(job))

    def _die(self, me: str) -> None:
        """A message has killed its consumer."""
        again_s = 0.01 + 0.1 * self.world.draw.random()
        for job in self.jobs:
            if job.process is not None and job.process.name == me:
                self.world.call_later(0, partial(self._kill, job, again_s))

    def _cut_off(self, broker: _Job, for_s: float) -> None:
        """Whoever it serves may renew no lease meanwhile: to all others, it stands still."""
        until = self.world.now_ns + int(for_s * 1e9)
        for job in self.jobs:
            if job.machine != broker.machine and job.process is not None:
                self.notes.note("paused", job.process.name, until=until)

    # ---- faults ----

    def _trouble(self, fault: Fault) -> None:
        if self.healed:
            return
        self.troubles.append(fault.kind)
        self.world.trace(f"fault: {fault.kind} for {fault.for_s:.3f} s")
        getattr(self, f"_do_{fault.kind}")(fault)

    def _any(self, number: float) -> _Job:
        return self.jobs[int(number * len(self.jobs))]

    def _do_kill(self, fault: Fault) -> None:
        self._kill(self._any(fault.number), 0.01 + fault.for_s)

    def _do_pause(self, fault: Fault) -> None:
        job = self._any(fault.number)
        process = job.process
        assert process is not None
        if job.serves:
            self._cut_off(job, fault.for_s + _RECONNECT_S)
        until = self.world.now_ns + int(fault.for_s * 1e9)
        self.notes.note("paused", process.name, until=until)
        self.world.pause(process)
        self.world.call_later(fault.for_s, lambda: self._resume(process))

    def _resume(self, process: Process) -> None:
        if process.paused:
            self.world.trace(f"{process} goes on")
            self.world.resume(process)

    def _do_power(self, fault: Fault) -> None:
        """The machine with the files; what runs elsewhere is not told."""
        world, machine = self.world, DISK
        at = world.now_ns
        self.network.dark.add(machine)
        mine = [job for job in self.jobs if job.machine == machine]
        lost = self.disk.crash(lambda: [self._kill(job, 0.2 + fault.for_s) for job in mine])
        world.trace(f"power is lost; kept of the logs, and was there: {lost}")
        world.boots[machine] = world.boots.get(machine, 0) + 1
        until = at + int((0.1 + fault.for_s) * 1e9)
        self.notes.note("outage", until=until, crash=True)
        world.call_at(until, lambda: self.network.dark.discard(machine))

    def _do_cut(self, fault: Fault) -> None:
        machine = f"127.0.1.{1 + int(fault.number * self.plan.machines)}"
        self.network.cut(DISK, machine)
        until = self.world.now_ns + int(fault.for_s * 1e9)
        for job in self.jobs:
            if job.machine == machine and job.process is not None:
                self.notes.note("paused", job.process.name, until=until)  # to all others, it stands still
        self.world.call_later(fault.for_s, self.network.heal)

    def _do_break(self, fault: Fault) -> None:
        self.network.break_one()

    def _do_reply(self, fault: Fault) -> None:
        self.network.lost_in = 1 + int(fault.number * 12)

    def _do_commit(self, fault: Fault) -> None:
        """Committed, and nobody was told."""
        again_s = 0.01 + fault.for_s

        def kill(process: Process) -> None:
            for job in self.jobs:
                if job.process is process and not self.healed:
                    self._kill(job, again_s)

        for disk in self.disks.values():
            disk.fatal_in, disk.kill = 1 + int(fault.number * 12), kill

    def _do_glitch(self, fault: Fault) -> None:
        """One commit fails, and the next does not."""
        for disk in self.disks.values():
            disk.glitch_in = 1 + int(fault.number * 12)

    def _do_clock(self, fault: Fault) -> None:
        """Never more than an hour from the time: a step by more than two moves leases, and says so."""
        ahead_s = (fault.number - 0.5) * 7200
        self.world.trace(f"the wall clock is set to {ahead_s:.0f} s from the time")
        self.world.wall_ahead_ns[DISK] = int(ahead_s * 1e9)

    def _do_failing(self, fault: Fault) -> None:
        self.disk.failing_until_ns = self.world.now_ns + int(fault.for_s * 1e9)
        self.notes.note("outage", until=self.disk.failing_until_ns)

    def _do_away(self, fault: Fault) -> None:
        """One of two shards, with all its files; whoever has work on the other one goes on."""
        disk = self.disk
        disk.away = str(disk.path if fault.number < 0.3 else disk.folder / SHARD)
        disk.away_until_ns = self.world.now_ns + int(fault.for_s * 1e9)
        self.notes.note("outage", until=disk.away_until_ns + int(_RECONNECT_S * 1e9))

    def _do_full(self, fault: Fault) -> None:
        self.disk.full_until_ns = self.world.now_ns + int(fault.for_s * 1e9)
        self.notes.note("outage", until=self.disk.full_until_ns)

    def _do_slow(self, fault: Fault) -> None:
        """A flush may take longer than a lease: then nobody can renew it in time."""
        until = self.world.now_ns + int(fault.for_s * 1e9)
        self.disk.flush_s, self.disk.slow_until_ns = 0.2 + fault.number, max(until, self.disk.slow_until_ns)
        self.notes.note("outage", until=until + int(_RECONNECT_S * 2e9))
        self.world.call_at(until, self._hurry)

    def _hurry(self) -> None:
        if self.healed or self.world.now_ns >= self.disk.slow_until_ns:
            self.disk.flush_s = self.plan.flush_s

    # ---- the course of it ----

    async def direct(self) -> None:
        """Nothing of its own runs beside the processes: it would do their work for them."""
        mq = await connected(self.notes, self.path)
        await self._make(mq)
        await mq.close()
        self._hire()
        self.notes.ready = True
        begin = asyncio.get_running_loop().time()
        for fault in self.plan.faults:
            await asyncio.sleep(max(0.0, begin + fault.at_s - asyncio.get_running_loop().time()))
            self._trouble(fault)
        lasts = max((fault.for_s for fault in self.plan.faults), default=0.0)
        await asyncio.sleep(max(lasts, _POISON_S if self.plan.poison else 0.0))
        self._heal()
        until = asyncio.get_running_loop().time() + _FINISH_S
        await self._seems_finished(until)
        mq = await connected(self.notes, self.path)
        await self._finished(mq, until)
        await self._found(mq)
        self.world.finish()

    async def _make(self, mq: postroom.Connection) -> None:
        plan = self.plan
        window = "10m" if "ids" in plan.kinds else 0  # with one, no batch takes a short way
        await mq.create_topic(TOPIC, partitions=plan.partitions, storage=plan.storage, dedup_window=window)  # type: ignore[arg-type]
        for group in plan.groups:
            if group.mode == "kafka":
                continue  # it is there once somebody joins it
            order = {"order": group.order, "exhausted": group.exhausted} if group.mode == "ordered" else {}
            most = {} if group.mode == "broadcast" else {"max_attempts": plan.max_attempts}
            wish: dict[str, Any] = {"mode": group.mode, "lease": group.lease_s, **order, **most}
            start = "earliest" if group.mode == "broadcast" else group.start
            await mq.create_group(TOPIC, group.name, start=start, **wish)  # type: ignore[arg-type]

    def _heal(self) -> None:
        self.healed = self.notes.mended = True
        self.world.trace("everything is healed")
        self.network.heal()
        self.network.dark.clear()
        self.disk.failing_until_ns = self.disk.full_until_ns = self.disk.away_until_ns = 0
        self.network.lost_in = 0
        for disk in self.disks.values():
            disk.fatal_in = disk.glitch_in = 0
        self._hurry()
        for job in self.jobs:
            if job.process is not None:
                self._resume(job.process)

    async def _seems_finished(self, until: float) -> None:
        """As far as the processes noted. Some that was settled is not noted: then it is asked for."""
        loop, names = asyncio.get_running_loop(), self._group_names()
        patience = 0.0
        while loop.time() < until and patience < _UNNOTED_S:
            await asyncio.sleep(0.05)
            if self._lasting <= self.notes.done:
                if all(self.notes.confirmed <= self.notes.settled[name] for name in names):
                    return
                patience += 0.05

    async def _finished(self, mq: postroom.Connection, until: float) -> None:
        """Where something was left it is asked twice: the first time by a route that may be old."""
        left: object = "nothing"
        again = False
        while asyncio.get_running_loop().time() < until:
            left = await self._left(mq) if self._lasting <= self.notes.done else "senders, or changes"
            if not left and not again:
                return
            again = bool(left)
            await asyncio.sleep(0.25 if left else _FRESH_S)
        raise AssertionError(f"not finished {_FINISH_S:.0f} s after everything was healed: {left}")

    async def _left(self, mq: postroom.Connection) -> list[str]:
        try:
            delayed = (await mq.topic(TOPIC)).delayed
            for group in self.plan.groups:
                if group.exhausted == "stop":
                    await self._restart(mq, group.name)
            used = {one.partition async for one in mq.read(TOPIC)} if self.plan.kafka else set()
            names = [name for name in self._group_names() if used or name != "kafka"]
            lags = [await mq.lag(TOPIC, name) for name in names]  # without a commit there is no such group
        except postroom.UnknownGroup as error:  # a member that was never there
            return [error.code]
        except postroom.PostroomError as error:
            if not error.retriable and not isinstance(error, postroom.StoreFull):
                raise
            return [error.code]
        behind = [f"{lag.group} {lag.total.messages}" for lag in lags if lag.total.messages]
        for lag in lags:  # where Kafka clients have committed nothing, nobody knows where they begin
            if lag.group == "kafka" and (new := used - {row.partition for row in lag.partitions}):
                behind.append(f"kafka has not begun {sorted(new)}")
        return [*([f"{delayed} delayed"] if delayed else []), *behind]

    async def _restart(self, mq: postroom.Connection, group: str) -> None:
        """As people would. They find only what a member has condemned."""
        for one in await mq.stopped(TOPIC, group):
            id = one.value.decode()
            if not any(event.did == "condemned" and event.id == id for event in self.notes.events):
                self.innocent.append(f"{group}: innocent: {id} (stopped: {one.reason})")
        await mq.restart_stopped(TOPIC, group)

    def _group_names(self) -> list[str]:
        """In mode "broadcast" every member has a group of its own."""
        return [
            name
            for group in self.plan.groups
            for name in (
                [f"{group.name}@{group.name[0]}{number}" for number in range(group.members)]
                if group.mode == "broadcast"
                else [group.name]
            )
        ]

    async def _found(self, mq: postroom.Connection) -> None:
        async for message in mq.read(TOPIC):
            at = {"partition": message.partition, "offset": message.offset}
            self.notes.note("stored", "", message.value.decode(), **at)
        for group in self.plan.groups:
            if group.mode not in _NO_DEAD_LETTERS:
                for letter in await mq.dead_letters(TOPIC, group.name, limit=10_000):
                    self.notes.note("dead", "", letter.value.decode(), group=group.name)

    def judged(self) -> list[str]:
        events, faults = self.notes.events, list(dict.fromkeys(self.innocent))
        modes = {group.name: group for group in self.plan.groups}
        for name in self._group_names():
            group = modes[name.partition("@")[0]]
            verdict = check.group(
                events, name, ordered=group.mode in ("ordered", "kafka"),
                dead_letters=group.mode not in _NO_DEAD_LETTERS,
                lease_ns=int(group.lease_s * 2e9), lazy_ns=_LAZY_NS,
            )  # fmt: skip
            self.world.trace(f"{name}: {verdict}")
            # what fails until it is mended may be a dead letter by then, or not
            faults += [
                f"{name}: {fault}"
                for fault in verdict.faults
                if fault.kind != "not dead" or not fault.id.endswith(("fail", "kill"))
            ]
        verdict = check.log(events)
        self.world.trace(f"log: {verdict}")
        return faults + [f"log: {fault}" for fault in verdict.faults]


# ---- one seed ----


class _Told(logging.Handler):
    """What Postroom logs is part of the trace; an error that it did not expect is a fault."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.WARNING)
        self._world = world
        self.unexpected: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._world.trace(f"log: {record.levelname} {record.getMessage()}")
        if record.exc_info and record.exc_info[1] is not None:
            self.unexpected.append(f"{record.getMessage()}: {record.exc_info[1]!r}")


@contextmanager
def _listening(world: World) -> Iterator[_Told]:
    told, logger = _Told(world), logging.getLogger("postroom")
    logger.addHandler(told)
    logger.propagate = False
    try:
        yield told
    finally:
        logger.removeHandler(told)


def _disks(world: World, plan: Plan, folder: Path, template: Path) -> dict[str, Disk]:
    files = template.parent.with_name("sharded") / template.name if plan.sharded else template
    found = {DISK: Disk(world, folder, files)}
    for number in range(1, plan.machines + 1):
        found[f"127.0.1.{number}"] = Disk(world, folder / f"machine{number}")
    for disk in found.values():
        disk.flush_s = plan.flush_s
        for sender in plan.senders:
            if sender.way == "spool":
                shutil.copyfile(template.with_name(SPOOL), disk.folder / f"{sender.name}.spool")
    return found


def play(seed: int, folder: Path, template: Path) -> Outcome:
    """Run a seed to its end."""
    world = World(seed, until_s=900, steps=600_000)
    world.network = Network(world)  # type: ignore[attr-defined]
    plan = plan_of(seed)
    world.disks = disks = _disks(world, plan, folder, template)  # type: ignore[attr-defined]
    world.folder = f"{folder}/"
    world.network.slow_s = plan.slow_s  # type: ignore[attr-defined]
    outcome = Outcome(seed)
    director = Director(world, plan, disks)
    for line in plan.lines():
        world.trace(line)
    run_process(world, world.process("director", DISK), director.direct)
    with _listening(world) as told:
        try:
            world.run()
            outcome.faults = director.judged()
        except Exception as error:
            outcome.faults = [f"{type(error).__name__}: {error}"]
            world.lines += traceback.format_exception(error)[-12:]
    outcome.faults += told.unexpected
    outcome.lines = world.lines
    outcome.digest, outcome.steps, outcome.simulated_s = world.digest, world.steps, world.elapsed_s
    outcome.troubles, outcome.kinds = director.troubles, plan.kinds
    did = Counter(event.did for event in director.notes.events)
    outcome.confirmed, outcome.handled = did["confirmed"], did["handled"]
    return outcome
