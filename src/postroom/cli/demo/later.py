"""The act about time: delayed messages come when they are due, and one that is cancelled never does (R35)."""

from __future__ import annotations

import asyncio
import random
import time
from datetime import datetime

import postroom

from .scene import PATIENCE_S, Scene

__all__ = ["deliver_later"]

_GROUP = "mail"
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
    """When each came, by id; a moment longer than needed, for one that should not come."""
    arrived: dict[str, float] = {}
    async with asyncio.timeout(PATIENCE_S), mq.consumer(topic, _GROUP) as consumer:
        while len(arrived) < count:
            messages = await consumer.poll()
            now = time.time()
            arrived.update({message.id: now for message in messages})
            await consumer.ack(messages)
        rest = await consumer.poll(wait=0.2)
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
