"""The story of the queue, act by act: send, consume, kill, poison, order, split, later; and how it ends.

Every number shown is measured: sends by their receipts, handling by the ledgers of the processes, lag by the
queue. The demo fails if anything was lost, or if a message died that should not have.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import postroom

from ...config import DEFAULTS
from ...units import format_bytes
from .figures import LedgerAt, audit, out_of_order, write_journals
from .processes import DIED, LEDGER, POISON, Actor, Cast
from .scene import Scene, until

__all__ = ["play", "summary"]

_GROUPS = ("billing", "search")


async def play(scene: Scene) -> None:
    """Play all acts, in a queue of its own and with processes that end with it."""
    url = scene.figures.url
    play = _Play(scene)
    async with postroom.connect(url) as mq, Cast(url, scene.folder) as cast:
        await play.send(mq)
        await play.consume_and_kill(mq, cast)
        await play.poison(mq, cast)
        await keep_order(scene, mq, cast)
        await change_route(scene, mq, cast)
        await deliver_later(scene, mq)


class _Play:
    """Acts 1 to 4: send, consume, kill, poison."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.scale = scene, scene.scale
        self.stage, self.figures = scene.stage, scene.figures
        self.orders, self.payments = scene.topic("orders"), scene.topic("payments")
        self.sent: set[LedgerAt] = set()

    async def send(self, mq: postroom.Connection) -> None:
        say, count = self.stage.say, self.scale.messages
        self.stage.heading("1  A topic, and messages in it")
        await mq.create_topic(self.orders, partitions=4)
        orders = [postroom.Message(b'{"order": %d, "amount": %d}' % (n, n * 7 % 500)) for n in range(count)]
        before = time.perf_counter()
        parts = [orders[at : at + 5000] for at in range(0, count, 5000)]
        receipts = await asyncio.gather(*(mq.send_many(self.orders, part) for part in parts))
        seconds = time.perf_counter() - before
        self.sent = {(r.partition, r.offset) for part in receipts for r in part}
        self.figures.sent, self.figures.sent_per_s = len(self.sent), len(self.sent) / seconds
        say(self.figures.where)
        say(
            f"Sent **{len(self.sent):,} messages** to topic {self.orders} in {seconds:.2f} s: "
            f"**{self.figures.sent_per_s:,.0f} a second**, each confirmed only once it was flushed to disk."
        )

    async def consume_and_kill(self, mq: postroom.Connection, cast: Cast) -> None:
        say, scale = self.stage.say, self.scale
        self.stage.heading("2  Two groups, each gets every message")
        for group in _GROUPS:
            await mq.create_group(self.orders, group, lease=scale.lease)
        dies_at = f"holds={scale.messages // 5}"
        victim = await cast.start(self.orders, "billing", "billing-1", scale.pause(2), dies_at)
        await until(victim.begun, "the first process of group billing was given nothing")
        heir = await cast.start(self.orders, "billing", "billing-2", scale.pause(2))
        search = await cast.start(self.orders, "search", "search-1", scale.pause(1))
        say("Three processes: billing-1 and billing-2 share group billing, search-1 is group search.")
        await self._until(mq, lambda lags: _due_to_die(lags, victim, scale.messages))
        await victim.kill()
        killed = time.perf_counter()
        self.stage.heading("3  kill -9 in the middle")
        say(f"**Killed billing-1** (process {victim.pid}) with messages in its hands.")
        await self._until(mq, lambda lags: all(lag.total.messages == 0 for lag in lags))
        seconds = time.perf_counter() - killed
        for actor in (heir, search):
            actor.refuse_failure()
            await actor.stop()
        self._audit([victim, heir], search)
        say(
            f"billing-2 goes on alone. What a dead process held comes again after its lease, {scale.lease}: "
            f"**{self.figures.billing.again:,} messages**. "
            f"{seconds:.1f} s after the kill no message was waiting:"
        )
        self._report_handling()

    async def _until(self, mq: postroom.Connection, done: Callable[[Sequence[postroom.Lag]], bool]) -> None:
        """Show the lag until it is as wanted."""

        async def shown() -> bool:
            lags = [await mq.lag(self.orders, group) for group in _GROUPS]
            self.stage.lag(lags, self.scale.messages, last=done(lags))
            return done(lags)

        with self.stage.watching():
            await until(shown, "the demo's consumers did not finish")

    def _audit(self, billing: list[Actor], search: Actor) -> None:
        self.figures.billing = audit(self.sent, [actor.ledger for actor in billing])
        self.figures.search = audit(self.sent, [search.ledger])

    def _report_handling(self) -> None:
        figures = self.figures
        rows = [("group", "handled", "lost", "delivered again", "handled twice")]
        rows += [
            (name, f"{a.handled:,} of {a.sent:,}", f"{a.lost:,}", f"{a.again:,}", f"{a.twice:,}")
            for name, a in (("billing", figures.billing), ("search", figures.search))
        ]
        self.stage.columns(rows)
        self.stage.say(
            "Counted from what the handlers wrote down, not from what the queue says.", style="dim"
        )

    async def poison(self, mq: postroom.Connection, cast: Cast) -> None:
        say, scale, figures = self.stage.say, self.scale, self.figures
        self.stage.heading("4  A message that kills whoever touches it")
        await mq.create_topic(self.payments, partitions=1)
        await mq.create_group(self.payments, "charge", lease=scale.poison_lease, max_attempts=2)
        poisonous = scale.payments // 2
        payments = [
            postroom.Message(b"payment=%d %s" % (n, POISON if n == poisonous else b"amount=10"))
            for n in range(scale.payments)
        ]
        receipts = await mq.send_many(self.payments, payments)
        sent = {(r.partition, r.offset) for r in receipts}
        say(f"{len(sent)} payments. One makes its process exit on the spot; it is restarted each time.")
        actors = await self._restart_until_done(mq, cast)
        letters = await mq.dead_letters(self.payments, "charge")
        neighbours = {(r.partition, r.offset) for n, r in enumerate(receipts) if n != poisonous}
        figures.deaths = sum(actor.exit_code == DIED for actor in actors)
        figures.neighbours = audit(neighbours, [actor.ledger for actor in actors])
        figures.dead = len(letters)
        figures.dead_is_poison = [POISON in letter.value for letter in letters] == [True]
        self._report_poison(letters)
        await self._fix(mq, cast, receipts[poisonous], actors)

    async def _restart_until_done(self, mq: postroom.Connection, cast: Cast) -> list[Actor]:
        """Do what a supervisor does: start the consumer again each time it dies."""
        actors = list[Actor]()

        async def drained() -> bool:
            if not (await mq.lag(self.payments, "charge")).total.messages:
                return True
            if not actors or actors[-1].exit_code is not None:
                if actors:
                    self.stage.say(f"{actors[-1].name} died (exit code {actors[-1].exit_code})", style="dim")
                name = f"charge-{len(actors) + 1}"
                actors.append(await cast.start(self.payments, "charge", name, "fragile"))
            actors[-1].refuse_failure()
            return False

        await until(drained, "the poison message was not isolated")
        await actors[-1].stop()
        return actors

    def _report_poison(self, letters: list[postroom.DeadLetter]) -> None:
        say, figures = self.stage.say, self.figures
        say(
            f"It **died {figures.deaths} times**. What it held was handed out in smaller and smaller parts, "
            "until the suspect was alone."
        )
        neighbours = figures.neighbours
        say(
            f"In the dead letters: **{figures.dead} message**. "
            f"Its neighbours handled: **{neighbours.handled} of {neighbours.sent}**."
        )
        for letter in letters:
            rows = {"id": letter.id, "value": letter.value.decode(errors="replace"),
                    "attempts": str(letter.attempts), "reason": letter.reason}  # fmt: skip
            self.stage.table(list(rows.items()))

    async def _fix(
        self, mq: postroom.Connection, cast: Cast, poison: postroom.Receipt, before: list[Actor]
    ) -> None:
        self.figures.redriven = await mq.redrive(self.payments, "charge")
        fixed = await cast.start(self.payments, "charge", "charge-fixed", "one-by-one")
        await until(_drained(mq, self.payments, "charge", fixed), "the redriven message was not handled")
        await fixed.stop()
        poisonous = {(poison.partition, poison.offset)}
        self.figures.redriven_handled = audit(poisonous, [fixed.ledger]).handled
        self.stage.say(
            f"Then the handler is fixed and the dead letter redriven, to that group alone: "
            f"**{self.figures.redriven_handled} of {self.figures.redriven} handled**."
        )


def _due_to_die(lags: Sequence[postroom.Lag], victim: Actor, total: int) -> bool:
    """Tell whether it is the middle: the victim has messages in flight, and a good part is done."""
    victim.refuse_failure()
    behind = lags[0].total.messages
    return victim.holds and behind <= total * 0.7


def _drained(
    mq: postroom.Connection, topic: str, group: str, *actors: Actor
) -> Callable[[], Coroutine[Any, Any, bool]]:
    """Make a condition: the group has nothing left to handle, and none of its processes has failed."""

    async def holds() -> bool:
        for actor in actors:
            actor.refuse_failure()
        return (await mq.lag(topic, group)).total.messages == 0

    return holds


# ---- act 5: keys stay in order while a member of an ordered group is killed (R23) ----
# The audit knows which booking of which account has which offset, and when each handler wrote one down.

_ORDER_GROUP = "ledger"
_PAUSE = "pause=0.001"


async def keep_order(scene: Scene, mq: postroom.Connection, cast: Cast) -> None:
    scale, figures, say = scene.scale, scene.figures, scene.stage.say
    scene.stage.heading("5  Every key in order, and again kill -9")
    topic, numbers = scene.topic("bookings"), await _send_bookings(scene, mq)
    say(f"{len(numbers):,} bookings of {scale.accounts} accounts, in an ordered group of two processes.")
    dies_at = f"holds={len(numbers) // 10}"
    victim = await cast.start(topic, _ORDER_GROUP, f"{_ORDER_GROUP}-1", "one-by-one", _PAUSE, dies_at)
    await until(victim.begun, "the first member of the ordered group was given nothing")
    heir = await cast.start(topic, _ORDER_GROUP, f"{_ORDER_GROUP}-2", "one-by-one", _PAUSE)

    async def both_at_work() -> bool:
        victim.refuse_failure()
        heir.refuse_failure()
        return victim.holds and heir.handled_some

    await until(both_at_work, "the members of the ordered group were not both given something")
    await victim.kill()
    killed = time.perf_counter()

    await until(_drained(mq, topic, _ORDER_GROUP, heir), "the ordered group did not finish")
    seconds = time.perf_counter() - killed
    await heir.stop()
    ledgers = [victim.ledger, heir.ledger]
    figures.bookings = audit(set(numbers), ledgers)
    figures.out_of_order = out_of_order(numbers, ledgers)
    say(
        f"**Killed {victim.name}**. {heir.name} took its partitions over after the lease, "
        f"{scale.order_lease}, and was done {seconds:.1f} s after the kill."
    )
    handled = figures.bookings
    say(
        f"Handled: **{handled.handled:,} of {handled.sent:,}**. Before an earlier one of the same account: "
        f"**{figures.out_of_order}**."
    )


async def _send_bookings(scene: Scene, mq: postroom.Connection) -> dict[LedgerAt, tuple[str, int]]:
    """Send bookings of all accounts, mixed; return where each one is, and which of its account it is."""
    topic, scale = scene.topic("bookings"), scene.scale
    await mq.create_topic(topic, partitions=4)
    await mq.create_group(topic, _ORDER_GROUP, mode="ordered", lease=scale.order_lease)
    named = [(f"account-{a}", n) for n in range(scale.bookings) for a in range(scale.accounts)]
    messages = [postroom.Message(b"booking=%d" % number, key=account) for account, number in named]
    receipts = await mq.send_many(topic, messages)
    return {(r.partition, r.offset): name for r, name in zip(receipts, named, strict=True)}


# ---- act 6: a topic is split and merged while it is written and read (R25) ----
# Senders and an ordered group never stop for it. The audit knows which trade of which key has which offset,
# whatever version of the route put it there: partitions have numbers that are never used again.

_SPLIT_GROUP = "watch"
_SENDERS = 4
_ROUNDS = 5  # of a sender's keys, in one list


async def change_route(scene: Scene, mq: postroom.Connection, cast: Cast) -> None:
    scene.stage.heading("6  Split and merged while everybody is at work")
    topic, scale, say = scene.topic("trades"), scene.scale, scene.stage.say
    await mq.create_topic(topic, partitions=2)
    await mq.create_group(topic, _SPLIT_GROUP, mode="ordered")
    members = [await cast.start(topic, _SPLIT_GROUP, f"{_SPLIT_GROUP}-{n}") for n in (1, 2)]
    say(f"{_SENDERS} senders, {scale.trade_keys} keys, and an ordered group of two processes. Nobody stops.")

    async def at_work() -> bool:
        for member in members:
            member.refuse_failure()
        return any(member.handled_some for member in members)

    sending = _Sending(mq, topic, [f"key-{n}" for n in range(scale.trade_keys)])
    async with sending.under_way():
        await until(at_work, "the ordered group was given nothing")
        for change in (_split, _split, _merge):
            await asyncio.sleep(scale.between_s)
            say(await change(mq, topic))
            scene.figures.changes += 1
        await asyncio.sleep(scale.between_s)
    await until(_drained(mq, topic, _SPLIT_GROUP, *members), "the ordered group did not finish")
    for member in members:
        await member.stop()
    ledgers = [member.ledger for member in members]
    scene.figures.trades = audit(set(sending.numbers), ledgers)
    scene.figures.trades_out_of_order = out_of_order(sending.numbers, ledgers)
    scene.figures.longest_send_ms = sending.longest_s * 1000
    write_journals(scene.folder, sending.numbers, ledgers)
    _report_trades(scene)


def _report_trades(scene: Scene) -> None:
    figures, say = scene.figures, scene.stage.say
    trades, wrong = figures.trades, figures.trades_out_of_order
    say(
        f"Handled: **{trades.handled:,} of {trades.sent:,}**. The longest that a send had to wait: "
        f"**{figures.longest_send_ms:.0f} ms**."
    )
    verdict = f"no, {wrong:,} were not" if wrong else "yes"
    say(
        f"**{trades.sent:,} messages of {scene.scale.trade_keys} keys, {figures.changes} changes of the "
        f"route, in order: {verdict}.**"
    )


async def _split(mq: postroom.Connection, topic: str) -> str:
    """Split the widest partition, and say so."""
    old = max((await mq.route(topic)).ranges, key=lambda piece: piece.slots)
    seconds, route = await _timed(lambda: mq.split(topic, old.partition))
    return f"**Split** {old} in {seconds * 1000:.0f} ms: {_pieces(route)}."


async def _merge(mq: postroom.Connection, topic: str) -> str:
    one, other = (await mq.route(topic)).ranges[:2]
    seconds, route = await _timed(lambda: mq.merge(topic, one.partition, other.partition))
    numbers = f"{one.partition} and {other.partition}"
    return f"**Merged** partitions {numbers} in {seconds * 1000:.0f} ms: {_pieces(route)}."


async def _timed(
    change: Callable[[], Coroutine[Any, Any, postroom.Route]],
) -> tuple[float, postroom.Route]:
    began = time.perf_counter()
    route = await change()
    return time.perf_counter() - began, route


def _pieces(route: postroom.Route) -> str:
    return "now " + ", ".join(str(piece.partition) for piece in route.ranges)


class _Sending:
    """Senders at work. Every key belongs to one of them, so that its messages have an order."""

    def __init__(self, mq: postroom.Connection, topic: str, keys: list[str]) -> None:
        self._mq, self._topic, self._keys = mq, topic, keys
        self._stopped = False
        self.numbers: dict[LedgerAt, tuple[str, int]] = {}
        self.longest_s = 0.0

    @asynccontextmanager
    async def under_way(self) -> AsyncIterator[None]:
        """Leaving the block lets the sends that are under way finish."""
        async with asyncio.TaskGroup() as senders:
            for n in range(_SENDERS):
                senders.create_task(self._send(self._keys[n::_SENDERS]))
            try:
                yield
            finally:
                self._stopped = True

    async def _send(self, keys: list[str]) -> None:
        first = 0
        while not self._stopped:
            named = [(key, first + round) for round in range(_ROUNDS) for key in keys]
            messages = [postroom.Message(b'{"trade": %d}' % number, key=key) for key, number in named]
            began = time.perf_counter()
            receipts = await self._mq.send_many(self._topic, messages)
            self.longest_s = max(self.longest_s, time.perf_counter() - began)
            self.numbers |= {(r.partition, r.offset): n for r, n in zip(receipts, named, strict=True)}
            first += _ROUNDS
            await asyncio.sleep(DEFAULTS.tuning.cli.demo_pause_s)


# ---- act 7: delayed messages come when they are due, and one that is cancelled never does (R35) ----

_MAIL = "mail"
_NEVER = "never"  # the id of the one that is cancelled


async def deliver_later(scene: Scene, mq: postroom.Connection) -> None:
    scale, figures, say = scene.scale, scene.figures, scene.stage.say
    scene.stage.heading("7  Not now")
    topic = scene.topic("reminders")
    await mq.create_topic(topic, partitions=1)
    dice = random.Random(scale.reminders)
    messages = [
        postroom.Message(b"reminder", id=f"r-{n}", delay=dice.uniform(0.2, scale.latest_s))
        for n in range(scale.reminders)
    ]
    receipts = await mq.send_many(topic, messages)
    await mq.send(topic, b"never mind", id=_NEVER, delay=scale.latest_s)
    figures.cancelled = await mq.cancel(topic, _NEVER)
    figures.reminders_sent = len(receipts)
    due = {receipt.id: receipt.due for receipt in receipts if receipt.due is not None}
    say(
        f"{len(receipts)} reminders, due within {scale.latest_s:g} s. One more is cancelled before it is due."
    )
    arrived = await _arrivals(mq, topic, len(receipts))
    figures.cancelled = figures.cancelled and arrived.pop(_NEVER, None) is None
    _judge(scene, due, arrived)
    typical, slow = figures.late_ms
    say(
        f"**{figures.reminders} of {figures.reminders_sent}** came, {figures.early} of them early; late by "
        f"**{typical:.0f} ms** typically, {slow:.0f} ms at the slowest of a hundred."
    )


async def _arrivals(mq: postroom.Connection, topic: str, count: int) -> dict[str, float]:
    """Return when each came, by id. It waits a moment longer than needed, for one that should not come."""
    arrived: dict[str, float] = {}
    async with asyncio.timeout(DEFAULTS.tuning.cli.demo_patience_s), mq.consumer(topic, _MAIL) as consumer:
        while len(arrived) < count:
            messages = await consumer.poll()
            now = time.time()
            arrived.update({message.id: now for message in messages})
            await consumer.ack(messages)
        rest = await consumer.poll(wait=DEFAULTS.tuning.cli.demo_last_s)
        arrived.update({message.id: time.time() for message in rest})
        await consumer.ack(rest)
    return arrived


def _judge(scene: Scene, due: dict[str, datetime], arrived: dict[str, float]) -> None:
    figures = scene.figures
    late_ms = sorted((arrived[id] - due[id].timestamp()) * 1000 for id in due if id in arrived)
    figures.reminders = len(late_ms)
    figures.early = sum(late < -1 for late in late_ms)  # to the millisecond
    if late_ms:
        figures.late_ms = (late_ms[len(late_ms) // 2], late_ms[len(late_ms) * 99 // 100])


# ---- the end ----


def summary(scene: Scene, no_pipeline: str | None = None) -> None:
    """Say what is left in the folder, whether all is well, and what to type next.

    `no_pipeline` says why the data pipeline was not shown, and how to see it.
    """
    figures, stage = scene.figures, scene.stage
    stage.heading("What is left")
    stage.table(_files(scene.folder))
    if figures.well:
        stage.say(f"**{figures.lost:,} messages lost.** It took {figures.seconds:.1f} s.", style="green")
    else:
        stage.say(f"**{figures.lost:,} messages lost**, or not where they belong: please report it.")
    stage.heading("Try next")
    for words in _commands(scene):
        stage.line(f"{_program()} -u {figures.shown} {words}")
    stage.heading("See it in a browser")
    if find_spec("fastapi") is None:
        stage.say(f"It needs the extra `server`: {postroom.errors.how_to_install('server')}, then")
    stage.line(f"{_program()} console {figures.shown}")
    if no_pipeline is not None:
        stage.heading("The data pipeline")
        stage.say(f"Archive, audit and hotspots were not shown. {no_pipeline}.")


def _files(folder: Path) -> list[tuple[str, str]]:
    """Return what is in the folder, by name; the ledgers in one line, for there are many."""
    rows, ledgers = list[tuple[str, str]](), list[int]()
    for path in sorted(folder.iterdir()):
        size = sum(one.stat().st_size for one in path.rglob("*")) if path.is_dir() else path.stat().st_size
        if path.suffix == LEDGER:
            ledgers += [size] if size else []
        elif size and path.name[0] != ".":
            rows.append((f"{path}{'/' if path.is_dir() else ''}", format_bytes(size)))
    return [*rows, (f"{len(ledgers)} ledgers of handlers", format_bytes(sum(ledgers)))]


def _commands(scene: Scene) -> list[str]:
    orders, payments, pipeline = scene.topic("orders"), scene.topic("payments"), scene.figures.pipeline
    words = [f"lag {orders}", f"read {orders} --limit 3", f"group show {payments} charge"]
    return [*words, f"route apply {pipeline.plan}"] if pipeline and pipeline.plan is not None else words


def _program() -> str:
    """Return how this program is called from here: by name, or by its path if it is not on the PATH."""
    beside = Path(sys.executable).parent / "postroom"
    return "postroom" if shutil.which("postroom") or not beside.exists() else os.path.relpath(beside)
