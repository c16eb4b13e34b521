"""The processes of the demo: started, watched, killed, and never left behind.

Each is a session of its own, so that Ctrl-C reaches the demo alone; it ends them. Should the demo itself be
killed, they notice that their standard input ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from subprocess import PIPE

from ...errors import PostroomError
from . import member
from .ledger import holds

__all__ = ["LEDGER", "Actor", "Cast"]

LEDGER = ".handled"

_STOP_S = 10.0


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
        """Messages that it will not finish: killed now, it dies at work."""
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
            await asyncio.wait_for(self._process.wait(), _STOP_S)
        except TimeoutError:
            await self.kill()

    async def begun(self) -> bool:
        self.refuse_failure()
        return self.handled_some

    def refuse_failure(self) -> None:
        """A process that ended by itself, and not by poison, is a fault of the demo: say so."""
        if self.exit_code not in (None, 0, member.DIED, -signal.SIGKILL):
            raise PostroomError(f"the demo's process {self.name} failed with exit code {self.exit_code}")


class Cast:
    """All processes. Leaving the block ends those that still run."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url, self._folder = url, folder
        self._actors: list[Actor] = []

    async def start(self, topic: str, group: str, name: str, *options: str) -> Actor:
        ledger = self._folder / f"{name}{LEDGER}"
        line = member.command(topic, group, name, ledger, *options)
        environment = {**os.environ, member.URL: self._url}
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
