"""Runs a suite's programs with a time limit, and our listener beside them.

A program runs in a process group of its own and is ended with all that it started, by its id.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from bench.peers.peer import ServerProcess
from tests.servers import PostgresServer
from tests.servers.places import HOST, free_port

__all__ = ["STORES", "TIMED_OUT", "Listener", "Ran", "beside", "listener", "run"]

STORES = ("sqlite", "postgres")
TIMED_OUT = 124  # as timeout(1) says it


@dataclass(frozen=True, slots=True)
class Ran:
    code: int
    said: str  # both streams, in their order

    @property
    def last_line(self) -> str:
        lines = [line.strip() for line in self.said.splitlines() if line.strip()]
        return lines[-1][:200] if lines else f"exit code {self.code}, and not a word"


@dataclass(frozen=True, slots=True)
class Listener:
    """Where clients find it: Kafka's, and our own; and what further brokers of the queue are started with."""

    address: str
    url: str
    folder: Path
    serve: tuple[str, ...] = ()
    only: str = "*"  # the cases that are wanted, in suites that run each in a process

    def wants(self, case: str) -> bool:
        return fnmatchcase(case, self.only)

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])


def run(
    command: Sequence[str | Path],
    limit_s: float,
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] = {},
    given: bytes = b"",
) -> Ran:
    """What the program said, and its code; `TIMED_OUT` if it was ended for taking too long."""
    process = subprocess.Popen(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(given, timeout=limit_s)
        code = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
        code = TIMED_OUT
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    return Ran(code, said.decode(errors="replace"))


@contextmanager
def listener(store: str, *, sharded: bool = False) -> Iterator[Listener]:
    """A broker with an empty queue, which makes topics when it is asked for them.

    `sharded`: the queue has a second database, where partitions can be moved.
    """
    with ServerProcess("kafka-clients") as server:
        other = [f"--shard=other=sqlite:///{server.folder}/other.db"] if sharded else []
        if store == "sqlite":
            with _served(server, f"sqlite:///{server.folder}/q.db", other) as found:
                yield found
        else:
            with (
                PostgresServer() as postgres,
                _served(server, postgres.url(postgres.create_database()), other) as found,
            ):
                yield found


@contextmanager
def _served(server: ServerProcess, url: str, more: Sequence[str]) -> Iterator[Listener]:
    serve = [sys.executable, "-m", "postroom", "serve", url, *more, "--dev", "--migrate", "--http-port", "0"]
    port, kafka = free_port(), free_port()
    server.start([*serve, *_ports(port, kafka)], kafka)
    yield Listener(f"{HOST}:{kafka}", f"postroom://{HOST}:{port}", server.folder, tuple(serve))


def _ports(port: int, kafka: int) -> list[str]:
    return ["--port", str(port), "--kafka", str(kafka), "--kafka-create-topics"]


@contextmanager
def beside(first: Listener, kafka: int) -> Iterator[subprocess.Popen[bytes]]:
    """Another broker of the same queue, on that port for Kafka clients: it may be killed."""
    with (first.folder / "beside.log").open("ab") as said:
        command = [*first.serve, *_ports(free_port(), kafka)]
        process = subprocess.Popen(command, stdout=said, stderr=said, cwd=first.folder)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
