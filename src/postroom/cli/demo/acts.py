"""The story of the queue, act by act: send, consume, kill, poison, then `order`, `split` and `later`.

Every number shown is measured: sends by their receipts, handling by the ledgers of the processes, lag by the
queue. The demo fails if anything was lost, or if a message died that should not have.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import postroom

from ...errors import PostroomError
from .cast import Actor, Cast
from .later import deliver_later
from .ledger import Place, audit
from .member import DIED, POISON
from .order import keep_order
from .scene import LOOK_S, PATIENCE_S, Scene, until
from .split import change_route

__all__ = ["play"]

_GROUPS = ("billing", "search")


async def play(scene: Scene) -> None:
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
    def __init__(self, scene: Scene) -> None:
        self.scene, self.scale = scene, scene.scale
        self.stage, self.figures = scene.stage, scene.figures
        self.orders, self.payments = scene.topic("orders"), scene.topic("payments")
        self.sent: set[Place] = set()

    # ---- 1 ----

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

    # ---- 2 and 3 ----

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
        give_up = time.monotonic() + PATIENCE_S
        with self.stage.watching():
            while True:
                lags = [await mq.lag(self.orders, group) for group in _GROUPS]
                finished = done(lags)
                self.stage.lag(lags, self.scale.messages, last=finished)
                if finished:
                    return
                if time.monotonic() > give_up:
                    raise PostroomError(f"the demo's consumers did not finish within {PATIENCE_S:.0f} s")
                await asyncio.sleep(LOOK_S)

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

    # ---- 4 ----

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
        """What a supervisor does: start the consumer again each time it dies."""
        give_up, actors = time.monotonic() + PATIENCE_S, list[Actor]()
        while (await mq.lag(self.payments, "charge")).total.messages:
            if not actors or actors[-1].exit_code is not None:
                if actors:
                    self.stage.say(f"{actors[-1].name} died (exit code {actors[-1].exit_code})", style="dim")
                actors.append(
                    await cast.start(self.payments, "charge", f"charge-{len(actors) + 1}", "fragile")
                )
            if time.monotonic() > give_up:
                raise PostroomError(f"the poisonous message was not isolated within {PATIENCE_S:.0f} s")
            actors[-1].refuse_failure()
            await asyncio.sleep(LOOK_S)
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
        give_up = time.monotonic() + PATIENCE_S
        while (await mq.lag(self.payments, "charge")).total.messages and time.monotonic() < give_up:
            fixed.refuse_failure()
            await asyncio.sleep(LOOK_S)
        await fixed.stop()
        place = {(poison.partition, poison.offset)}
        self.figures.redriven_handled = audit(place, [fixed.ledger]).handled
        self.stage.say(
            f"Then the handler is fixed and the dead letter redriven, to that group alone: "
            f"**{self.figures.redriven_handled} of {self.figures.redriven} handled**."
        )


def _due_to_die(lags: Sequence[postroom.Lag], victim: Actor, total: int) -> bool:
    """In the middle: the victim has something in its hands, and a good part is done."""
    victim.refuse_failure()
    behind = lags[0].total.messages
    return victim.holds and behind <= total * 0.7
