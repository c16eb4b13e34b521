"""The demo's consumer processes: the program of one, and how they are started, watched and killed.

The program, `python -m postroom.cli.demo.processes TOPIC GROUP NAME LEDGER …`, handles a message (a pause, so
that one can watch), writes it into its ledger, and only then acks it. A poison message kills the process
on the spot, as a bug in C code or the kernel's memory killer would. One that is to be killed keeps what it is
given after a while in its hands, so that the kill meets it at work.

Each process is a session of its own, so that Ctrl-C reaches the demo alone, which ends them. Should the demo
itself be killed, they notice that their standard input ends: none is ever left behind.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
from pathlib import Path
from subprocess import PIPE

import postroom

from ...config import DEFAULTS
from ...errors import PostroomError
from .figures import Ledger, holds

__all__ = ["DIED", "LEDGER", "POISON", "Actor", "Cast"]

LEDGER = ".handled"
URL = "POSTROOM_DEMO_URL"  # in the environment: a password does not belong on a command line
POISON = b"amount=NaN"
DIED = 13  # exit code of a process that met the poison
_AT_ONCE = 500


class Actor:
    """A consumer process and the ledger it writes."""

    def __init__(self, name: str, ledger: Path, process: asyncio.subprocess.Process) -> None:
        self.name, self.ledger = name, ledger
        self._process = process

    @property
    def handled_some(self) -> bool:
        return self.ledger.exists() and self.ledger.stat().st_size > 0

    @property
    def holds(self) -> bool:
        """True while it has messages that it will not finish: killed now, it dies at work."""
        return holds(self.ledger)

    @property
    def exit_code(self) -> int | None:
        return self._process.returncode

    @property
    def pid(self) -> int:
        return self._process.pid

    async def kill(self) -> None:
        """kill -9: it has no chance to say goodbye."""
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGKILL)
        await self._process.wait()

    async def stop(self) -> None:
        """Ask it to leave: it hands back what it holds."""
        if self._process.returncode is None:
            self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), DEFAULTS.tuning.cli.demo_stop_s)
        except TimeoutError:
            await self.kill()

    async def begun(self) -> bool:
        self.refuse_failure()
        return self.handled_some

    def refuse_failure(self) -> None:
        """A process that ended by itself, and not by poison, is a fault of the demo: say so."""
        if self.exit_code not in (None, 0, DIED, -signal.SIGKILL):
            raise PostroomError(f"the demo's process {self.name} failed with exit code {self.exit_code}")


class Cast:
    """The cast starts all processes. Leaving the block ends those that still run."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url, self._folder = url, folder
        self._actors: list[Actor] = []

    async def start(self, topic: str, group: str, name: str, *options: str) -> Actor:
        ledger = self._folder / f"{name}{LEDGER}"
        line = command(topic, group, name, ledger, *options)
        environment = {**os.environ, URL: self._url}
        process = await asyncio.create_subprocess_exec(
            *line, stdin=PIPE, start_new_session=True, env=environment
        )
        actor = Actor(name, ledger, process)
        self._actors.append(actor)
        return actor

    async def __aenter__(self) -> Cast:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(actor.kill() for actor in self._actors))


# ---- the program of one ----


def command(topic: str, group: str, name: str, ledger: Path, *options: str) -> list[str]:
    """Return the command line that starts one.

    Options are pause=SECONDS, one-by-one, fragile and holds=MESSAGES.
    """
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
    """Keep what is in flight until the process is killed."""
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
