"""The act about order: keys stay in order while a member of an ordered group is killed (R23).

The audit knows which booking of which account is at which place, and when each handler wrote one down.
"""

from __future__ import annotations

import time

import postroom

from .cast import Cast
from .ledger import Place, audit, out_of_order
from .scene import Scene, until

__all__ = ["keep_order"]

_GROUP = "ledger"
_PAUSE = "pause=0.001"


async def keep_order(scene: Scene, mq: postroom.Connection, cast: Cast) -> None:
    scale, figures, say = scene.scale, scene.figures, scene.stage.say
    scene.stage.heading("5  Every key in order, and again kill -9")
    topic, numbers = scene.topic("bookings"), await _send(scene, mq)
    say(f"{len(numbers):,} bookings of {scale.accounts} accounts, in an ordered group of two processes.")
    dies_at = f"holds={len(numbers) // 10}"
    victim = await cast.start(topic, _GROUP, f"{_GROUP}-1", "one-by-one", _PAUSE, dies_at)
    await until(victim.begun, "the first member of the ordered group was given nothing")
    heir = await cast.start(topic, _GROUP, f"{_GROUP}-2", "one-by-one", _PAUSE)

    async def both_at_work() -> bool:
        victim.refuse_failure()
        heir.refuse_failure()
        return victim.holds and heir.handled_some

    await until(both_at_work, "the members of the ordered group were not both given something")
    await victim.kill()
    killed = time.perf_counter()

    async def drained() -> bool:
        heir.refuse_failure()
        return (await mq.lag(topic, _GROUP)).total.messages == 0

    await until(drained, "the ordered group did not finish")
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


async def _send(scene: Scene, mq: postroom.Connection) -> dict[Place, tuple[str, int]]:
    """Bookings of all accounts, mixed; where each one is, and which of its account it is."""
    topic, scale = scene.topic("bookings"), scene.scale
    await mq.create_topic(topic, partitions=4)
    await mq.create_group(topic, _GROUP, mode="ordered", lease=scale.order_lease)
    named = [(f"account-{a}", n) for n in range(scale.bookings) for a in range(scale.accounts)]
    messages = [postroom.Message(b"booking=%d" % number, key=account) for account, number in named]
    receipts = await mq.send_many(topic, messages)
    return {(r.partition, r.offset): name for r, name in zip(receipts, named, strict=True)}
