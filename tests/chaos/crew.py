"""Processes that produce, consume and change routes: started, killed -9, started again; what they left.

Decides nothing about messages. Notices a process that ended by itself: the test fails with its last words.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from postroom.testing.check import Did, Event

from .journal import Entry, read
from .values import parse

__all__ = ["Crew"]

_ROOT = Path(__file__).parents[2]
_DID: dict[str, Did] = {
    "sending": "sending",
    "confirmed": "confirmed",
    "handled": "handled",
    "settled": "settled",
    "gone": "gone",
}


@dataclass(frozen=True)
class _Job:
    role: str
    topic: str
    name: str  # of a producer or changer; of a consumer: its group and a number
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class _Worker:
    job: _Job
    run: int
    pid: int
    version: Path | None = None

    @property
    def title(self) -> str:
        return f"{self.job.role}-{self.job.topic}-{self.job.name}-{self.run}"


class Crew:
    """Use as `with`: nothing is left running. `at_work` are those that live, by process id. `version`:
    where those started from now on have their modules from; None: from here."""

    def __init__(
        self,
        url: str,
        folder: Path,
        shards: Mapping[str, str] | None = None,
        *,
        served: str = "",
        embedded: Collection[str] = (),
        version: Path | None = None,
    ) -> None:
        """`served`: the address of brokers that all but the brokers themselves connect to, and those whose
        role or topic is `embedded`."""
        self._url, self.folder, self._shards, self._served = url, folder, dict(shards or {}), served
        self._embedded = {"broker", *embedded}
        self.at_work: dict[int, _Worker] = {}
        self.killed: dict[str, int] = {}
        self.outages: list[Event] = []
        self._runs = 0
        self._nurseries: dict[Path | None, subprocess.Popen[str]] = {}
        self.version = version
        self._nursery(version)

    # ---- life and death ----

    def produce(
        self,
        topic: str,
        name: str,
        delays: Iterable[float] = (),
        pause_s: float = 0.02,
        *,
        keyless: bool = False,
    ) -> None:
        """`delays`: shortest and longest, in seconds. `pause_s`: the longest between two sends. `keyless`:
        one message after the other, without a key, each with little time."""
        self._start(_Job("producer", topic, name, (list(delays), pause_s, keyless)))

    def consume(self, topic: str, group: str, *, members: int, ordered: bool = False) -> None:
        for number in range(members):
            self._start(_Job("consumer", topic, f"{group}-{number}", (group, ordered)))

    def belong(self, topic: str, member: str | None) -> None:
        """A member of a broadcast group; None: one without a name."""
        self._start(_Job("member", topic, member or f"_{self._runs}", (member,)))

    def change(self, topic: str, name: str, longest_s: float = 0.6) -> None:
        """Change its route, again and again, at most so long after the change before."""
        self._start(_Job("changer", topic, name, (longest_s,)))

    def operate(self, topic: str, name: str, group: str) -> None:
        """Look after what stopped in the group."""
        self._start(_Job("operator", topic, name, (group,)))

    def serve(self, port: int, advertise: str = "") -> None:
        """A broker on that port; `advertise`: the address that clients are told."""
        self._start(_Job("broker", "-", str(port), (port, advertise)))

    def _start(self, job: _Job) -> None:
        self._runs += 1
        worker = _Worker(job, self._runs, 0)
        journal = str(self.folder / f"{worker.title}.journal")
        identity = (job.name, self._runs) if job.role == "producer" else ()
        served = self._served and not {job.role, job.topic} & self._embedded
        url, shards = (self._served, {}) if served else (self._url, self._shards)
        arguments = [url, shards, job.topic, journal, *identity, *job.arguments]
        errors = str(self.folder / f"{worker.title}.errors")
        pid = self._ask(self.version, "start", job.role, arguments, errors)
        self.at_work[pid] = _Worker(job, self._runs, pid, self.version)

    def kill(self, pid: int, *, again: bool = True) -> None:
        """-9; and start another one in its place."""
        self._end(pid, "kill", -signal.SIGKILL, again=again)

    def restart(self, pid: int) -> None:
        """Ask a broker to end, which finishes what it has begun; then start another one in its place."""
        self._end(pid, "stop", 0, again=True)

    def _end(self, pid: int, verb: str, expected: int, *, again: bool) -> None:
        worker = self.at_work.pop(pid)
        self.killed[worker.title] = time.time_ns()
        status = self._ask(worker.version, verb, pid)
        if status != expected:
            errors = (self.folder / f"{worker.title}.errors").read_text()
            raise AssertionError(f"{worker.title} ended with {status}, not {expected}:\n{errors}")
        if again:
            self._start(worker.job)

    def pause(self, pid: int, paused: bool) -> None:
        """Stop it in its tracks, or let it go on."""
        os.kill(pid, signal.SIGSTOP if paused else signal.SIGCONT)

    def kill_any(self) -> None:
        self.kill(random.choice(list(self.at_work)))

    def of(self, role: str) -> list[int]:
        """Those of this role that live."""
        return [worker.pid for worker in self.at_work.values() if worker.job.role == role]

    def at(self, role: str, verb: str = "") -> list[int]:
        """Those of this role whose last note is this; without a verb: who have noted anything."""
        workers = [worker for worker in self.at_work.values() if worker.job.role == role]
        return [w.pid for w in workers if (last := self._last(w)) and verb in ("", last)]

    def notes(self, role: str, verb: str) -> dict[int, int]:
        """How often each of this role that lives has noted it."""
        workers = [worker for worker in self.at_work.values() if worker.job.role == role]
        return {w.pid: sum(note.verb == verb for note in self._notes(w)) for w in workers}

    def _last(self, worker: _Worker) -> str:
        notes = self._notes(worker)
        return notes[-1].verb if notes else ""

    def _notes(self, worker: _Worker) -> list[Entry]:
        path = self.folder / f"{worker.title}.journal"
        return read(path) if path.exists() else []

    def dismiss(self, role: str) -> None:
        for worker in list(self.at_work.values()):
            if worker.job.role == role:
                self.kill(worker.pid, again=False)

    def _nursery(self, version: Path | None) -> subprocess.Popen[str]:
        if version not in self._nurseries:
            self._nurseries[version] = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.nursery"],
                cwd=_ROOT,
                env=os.environ if version is None else {**os.environ, "PYTHONPATH": str(version)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        return self._nurseries[version]

    def _ask(self, version: Path | None, *order: Any) -> int:
        nursery = self._nursery(version)
        assert nursery.stdin is not None and nursery.stdout is not None
        nursery.stdin.write(json.dumps(order) + "\n")
        nursery.stdin.flush()
        return int(nursery.stdout.readline())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for nursery in self._nurseries.values():
            assert nursery.stdin is not None and nursery.stdout is not None
            nursery.stdin.close()
            nursery.wait(timeout=30)
            nursery.stdout.close()

    # ---- what they left ----

    def history(self, topic: str, group: str) -> list[Event]:
        """What concerns one group, for the checkers."""
        notes = {**self.journals(f"producer-{topic}-*"), **self.journals(f"consumer-{topic}-{group}-*")}
        events = [
            Event(entry.at, _DID[entry.verb], title, entry.value, parse(entry.value).key)
            for title, entries in notes.items()
            for entry in entries
            if entry.verb in _DID
        ]
        killed = [Event(at, "killed", title) for title, at in self.killed.items()]
        return [*events, *killed, *self.outages]

    def lives(self, role: str) -> dict[str, list[Entry]]:
        """What those of this role noted: by name, over all runs; without a name, only who lives."""
        found: dict[str, list[Entry]] = {}
        for title, entries in self.journals(f"{role}-*").items():
            _, _, name, run = title.split("-")
            if not name.startswith("_"):
                found.setdefault(name, []).extend(entries)
            elif int(run) in {worker.run for worker in self.at_work.values()}:
                found[title] = entries
        return found

    def count(self, verb: str, topic: str = "*") -> int:
        """How often this was noted by anybody so far."""
        word = f" {verb} ".encode()
        return sum(path.read_bytes().count(word) for path in self.folder.glob(f"*-{topic}-*.journal"))

    def values(self, role: str, verb: str) -> list[str]:
        """What all of this role noted so."""
        notes = self.journals(f"{role}-*").values()
        return [entry.value for entries in notes for entry in entries if entry.verb == verb]

    def journals(self, pattern: str) -> dict[str, list[Entry]]:
        """By process, what all whose title is like this noted."""
        return {path.stem: read(path) for path in self.folder.glob(f"{pattern}.journal")}
