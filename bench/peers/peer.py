"""What the harness asks of a contender, and the server that it runs for one.

A contender is one file: it starts its server, and opens a publisher and a taker in processes of their own.
Each uses the usual Python client as fast as its users would: `batch` messages a call, `at_once` calls in
flight. A publisher must never return before its messages are durable on the server, by the server's word.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Protocol, Self

from tests.servers.places import HOST, base_folder
from tests.servers.watchdog import Watchdog

__all__ = ["HOST", "NotInstalled", "Peer", "Publisher", "ServerProcess", "Taker", "program"]


class NotInstalled(Exception):
    """The contender cannot run here; the message says what to do about it."""


class Publisher(Protocol):
    async def publish(self, values: list[bytes]) -> int:
        """How many are confirmed: all of them."""

    async def close(self) -> None: ...


class Taker(Protocol):
    async def take(self) -> tuple[list[bytes], Any]:
        """What is there, after at most a second of waiting; and what `ack` has to know about it."""

    async def ack(self, token: Any) -> None:
        """Back when the ack is confirmed, or sent where the protocol confirms none."""

    async def close(self) -> None: ...


class Peer(ABC):
    name: ClassVar[str]
    how: ClassVar[str]  # queue, flush and client, for the reader of the table
    batch: ClassVar[int]  # values in one call of `publish`
    at_once: ClassVar[int] = 1  # calls of `publish` in flight
    acks_at_once: ClassVar[int] = 1  # acks in flight while more is taken

    @abstractmethod
    def serve(self) -> AbstractContextManager[str]:
        """A server in a folder of its own: its address, for the processes. `NotInstalled` says what to do."""

    @abstractmethod
    async def create(self, address: str, queue: str) -> None: ...

    @abstractmethod
    async def publisher(self, address: str, queue: str, *, paced: bool) -> Publisher:
        """`paced`: single messages at a steady pace, so do not linger for more."""

    @abstractmethod
    async def taker(self, address: str, queue: str) -> Taker: ...


def program(name: str, how: str, folders: Sequence[str] = ("/usr/sbin", "/usr/local/sbin")) -> str:
    """Where it is; `how` to install it where it is not."""
    found = shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", os.defpath), *folders]))
    if found is None:
        raise NotInstalled(f"not installed: {how}")
    return found


class ServerProcess:
    """One process in a temporary folder: ended by its id, the folder removed, however the benchmark ends."""

    def __init__(self, name: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=f"postroom-bench-{name}-", dir=base_folder()))
        self._watchdog = Watchdog(self.folder, "TERM")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "it was started"
        return self._process.pid

    def start(
        self, command: Sequence[str | Path], port: int, env: Mapping[str, str] = {}, timeout_s: float = 60
    ) -> None:
        """Back when something listens on `port`."""
        log = self.folder / "log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                list(command),
                cwd=self.folder,
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._process = process
        self._watchdog.guard(process.pid)
        deadline = time.monotonic() + timeout_s
        while not _listens(port):
            if process.poll() is not None or time.monotonic() > deadline:
                words = log.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"{command[0]} did not start; its log ends:\n{words}")
            time.sleep(0.05)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._watchdog.guard(None)
        self._watchdog.dismiss()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((HOST, port)) == 0
