"""One consumer process of the demo: `python -m postroom.cli.demo.member TOPIC GROUP NAME LEDGER …`.

Handles a message (a pause, so that one can watch), writes it into its ledger, and only then acks it. A
poisonous message kills the process on the spot, as a bug in C code or the kernel's memory killer would. One
that is to be killed keeps what it is given after a while in its hands, so that the kill meets it at work.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
from pathlib import Path

import postroom

from .ledger import Ledger

__all__ = ["DIED", "POISON", "URL", "command"]

URL = "POSTROOM_DEMO_URL"  # in the environment: a password does not belong on a command line
POISON = b"amount=NaN"
DIED = 13  # exit code of a process that met the poison
_AT_ONCE = 500


def command(topic: str, group: str, name: str, ledger: Path, *options: str) -> list[str]:
    """The command line that starts one. Options: pause=SECONDS, one-by-one, fragile, holds=MESSAGES."""
    return [sys.executable, "-m", __spec__.name if __name__ == "__main__" else __name__,
            topic, group, name, str(ledger), *options]  # fmt: skip


async def consume(url: str, topic: str, group: str, name: str, ledger: Ledger, options: list[str]) -> None:
    pause_s, limit = _number(options, "pause=", 0.0), _number(options, "holds=", math.inf)
    async with (
        postroom.connect(url, client_id=name) as mq,
        mq.consumer(topic, group, member=name) as consumer,
    ):
        if "fragile" in options or "one-by-one" in options:
            await _one_by_one(consumer, ledger, pause_s, limit, fragile="fragile" in options)
        while True:
            messages = await consumer.poll(_AT_ONCE)
            await asyncio.sleep(pause_s * len(messages))
            if messages and ledger.noted >= limit:
                await _hold(ledger)
            ledger.note(messages)
            await consumer.ack(messages)


async def _one_by_one(
    consumer: postroom.Consumer, ledger: Ledger, pause_s: float, limit: float, *, fragile: bool
) -> None:
    async for message in consumer:
        if fragile and POISON in message.value:
            os._exit(DIED)
        await asyncio.sleep(pause_s)
        if ledger.noted >= limit:
            await _hold(ledger)
        ledger.note([message])
        await message.ack()


async def _hold(ledger: Ledger) -> None:
    """With messages in its hands, until it is killed."""
    ledger.note_hold()
    await asyncio.Event().wait()


def _number(options: list[str], name: str, default: float) -> float:
    return next((float(o.removeprefix(name)) for o in options if o.startswith(name)), default)


async def main(arguments: list[str]) -> None:
    topic, group, name, ledger, *options = arguments
    url = os.environ[URL]
    work = asyncio.create_task(consume(url, topic, group, name, Ledger(Path(ledger)), options))
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, work.cancel)
    loop.add_reader(sys.stdin.fileno(), os._exit, 0)  # nobody writes there: it ended, and the demo with it
    await asyncio.wait([work])
    if not work.cancelled():
        work.result()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
