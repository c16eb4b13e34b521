"""Several processes of one worker: started, watched, started again, stopped together.

Each is a new interpreter that runs the same command: nothing is forked, so no connection is ever shared. A
process that ends by itself is started again, after pauses that grow while it keeps ending; one that could not
start at all because of a mistake ends the others too, with its exit code. The first signal is passed on and
lets handlers end, the second hands back what they are at, a third kills. The processes are in sessions of
their own, so that Ctrl-C reaches them once, through here. Each has a line to the supervisor: over it it is
asked for its health and figures, and when the line breaks, because the supervisor is gone, it stops.

With `--reload` they are started anew whenever a Python file of this folder changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...backoff import SLOW
from ...config import DEFAULTS, CliTuning
from ...metrics import Family, Metrics, counter, single
from ..framework import exits

if TYPE_CHECKING:
    from postroom import App

__all__ = ["LINE", "Supervisor", "command_of", "python_files", "with_line"]

log = logging.getLogger("postroom.worker")

LINE = "POSTROOM_WORKER_LINE"
"""In the environment of a process: its end of the line."""

_ANSWER_BYTES = 64 << 20
_SKIPPED = {"node_modules", "site-packages", "__pycache__"}
_MOST_FILES = 20_000
_LIVED = 10  # pauses: a process that ran for longer than that many of the longest has not kept ending


# ---- in a process ----


@asynccontextmanager
async def with_line(descriptor: int, app: App) -> AsyncIterator[Callable[[], None]]:
    """Answer the supervisor while the block runs; what is yielded tells it that the app has started."""
    line = socket.socket(fileno=descriptor)
    line.set_inheritable(False)  # a handler's own children have nothing to do with it
    reader, writer = await asyncio.open_unix_connection(sock=line)
    answering = asyncio.create_task(_answer(app, reader, writer))
    try:
        yield lambda: writer.write(b"started\n")
    finally:
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
        writer.close()


async def _answer(app: App, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while asked := (await reader.readline()).strip():
            if asked == b"health":
                found: Any = app.health().as_dict()
            else:
                found = (await app.metrics(groups=asked == b"metrics")).as_json()
            writer.write(json.dumps(found).encode() + b"\n")
            await writer.drain()
    log.warning("the worker's supervisor is gone: stopping")
    os.kill(os.getpid(), signal.SIGTERM)


# ---- in the supervisor ----


class _Process:
    """One of the processes, and those that take its place."""

    def __init__(self, number: int, command: Sequence[str], tuning: CliTuning) -> None:
        self.number, self._command, self._tuning = number, command, tuning
        self.restarts = 0
        self.started = False  # the app of the process that runs now
        self.ever = False  # the app of any
        self._child: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._asking = asyncio.Lock()
        self._answers: asyncio.Queue[bytes] = asyncio.Queue()

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    def signal(self, number: int) -> None:
        if self._child is not None and self._child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._child.send_signal(number)

    async def run_once(self) -> int:
        """Run a process to its end; returns its exit code, or minus the signal that ended it."""
        ours, theirs = socket.socketpair()
        with theirs:
            environment = {**os.environ, LINE: f"{theirs.fileno()}"}
            self._child = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                env=environment,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        reader, self._writer = await asyncio.open_unix_connection(sock=ours, limit=_ANSWER_BYTES)
        self._answers = asyncio.Queue()
        hearing = asyncio.create_task(self._hear(reader))
        try:
            return await self._child.wait()
        finally:
            self.started = False
            hearing.cancel()
            self._writer.close()
            self._child = self._writer = None

    async def _hear(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError, ValueError):
            while line := await reader.readline():
                if line == b"started\n":
                    self.started = self.ever = True
                else:
                    self._answers.put_nowait(line)

    async def ask(self, what: str) -> Any:
        """What it answers; None if it does not, or not in time."""
        async with self._asking:
            writer = self._writer
            if writer is None:
                return None
            try:
                async with asyncio.timeout(self._tuning.process_answer_s):
                    writer.write(what.encode() + b"\n")
                    return json.loads(await self._answers.get())
            except (TimeoutError, OSError, ValueError):
                self._writer = None  # a late answer would be taken for that of the next question
                return None


class Supervisor:
    """`command` starts one process; its code is that of the first that could not start."""

    def __init__(
        self,
        command: Sequence[str],
        processes: int,
        *,
        files: Callable[[], dict[Path, int]] | None = None,
        tuning: CliTuning = DEFAULTS.tuning.cli,
    ) -> None:
        self._all = [_Process(number, command, tuning) for number in range(1, processes + 1)]
        self._files, self._tuning = files, tuning
        self._stopping = asyncio.Event()
        self._changed = asyncio.Event()  # the next change of a file
        self._told = 0
        self._code = exits.OK

    # ---- life ----

    async def run(self) -> int:
        """Run them until a signal comes, or one cannot start; returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.tell)
        watching = asyncio.create_task(self._watch()) if self._files is not None else None
        log.info("%d processes", len(self._all), extra={"fields": {"pid": os.getpid()}})
        try:
            await asyncio.gather(*(self._keep(one) for one in self._all))
        finally:
            if watching is not None:
                watching.cancel()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
        return self._code

    def tell(self) -> None:
        """A signal has come."""
        self._told += 1
        self._stopping.set()
        said = ("shutting down; waiting for running handlers", "second signal: handlers are cancelled")
        log.info(said[self._told - 1] if self._told <= len(said) else "another signal: processes are killed")
        for one in self._all:
            one.signal(signal.SIGTERM if self._told <= len(said) else signal.SIGKILL)

    async def _keep(self, one: _Process) -> None:
        loop, tries = asyncio.get_running_loop(), 0
        while not self._stopping.is_set():
            began, changed = loop.time(), self._changed
            code = await one.run_once()
            if self._stopping.is_set():
                return
            if self._files is not None:  # the next version may be better
                await self._until(changed, one, code)
                continue
            if code in (exits.FAILED, exits.USAGE) and not one.ever:
                self._end(one, code)
                return
            tries = 1 if loop.time() - began > _LIVED * SLOW.longest_s else tries + 1
            pause_s = SLOW.after(tries)
            log.error("process %d %s; started again in %.1f s", one.number, _ended(code), pause_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_s)
            one.restarts += 1

    def _end(self, one: _Process, code: int) -> None:
        """A mistake that waiting cannot mend."""
        log.error("process %d could not start: the worker ends", one.number)
        self._code = self._code or code
        self._stopping.set()
        for other in self._all:
            other.signal(signal.SIGTERM)

    # ---- reload ----

    async def _watch(self) -> None:
        assert self._files is not None
        before = self._files()
        while True:
            await asyncio.sleep(self._tuning.reload_check_s)
            now = await asyncio.to_thread(self._files)
            if now != before:
                names = sorted({path.name for path, _ in set(now.items()) ^ set(before.items())})
                log.info("changed: %s; starting again", ", ".join(names[:5]))
                before, changed, self._changed = now, self._changed, asyncio.Event()
                changed.set()
                for one in self._all:
                    one.signal(signal.SIGTERM)

    async def _until(self, changed: asyncio.Event, one: _Process, code: int) -> None:
        if not changed.is_set():
            log.error("process %d %s; started again when a file changes", one.number, _ended(code))
            waits = [asyncio.create_task(event.wait()) for event in (changed, self._stopping)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()

    # ---- what it is asked ----

    async def health(self) -> dict[str, Any]:
        """As `AppHealth.as_dict`, for each process."""
        found = await asyncio.gather(*(one.ask("health") for one in self._all))
        each = [
            {"process": one.number, "pid": one.pid, **(health or {"ok": False, "running": False})}
            for one, health in zip(self._all, found, strict=True)
        ]
        return {"ok": not self._stopping.is_set() and all(one["ok"] for one in each), "processes": each}

    async def text(self) -> str:
        """Figures of all processes; those of the queue are the same in each, and asked of one."""
        first = next((one for one in self._all if one.started), None)
        asked = [one.ask("metrics" if one is first else "own") for one in self._all]
        found = zip(self._all, await asyncio.gather(*asked), strict=True)
        each = [(one.number, Metrics.of_json(answer)) for one, answer in found if answer is not None]
        return Metrics((*_merged(each), *self._own())).text

    def _own(self) -> Iterator[Family]:
        yield single("worker_processes", "Processes that were asked for.", len(self._all))
        ready = sum(one.started for one in self._all)
        yield single("worker_processes_ready", "Processes whose app has started.", ready)
        restarts = [((str(one.number),), float(one.restarts)) for one in self._all]
        said = "How often a process that ended was started again."
        yield counter("worker_restarts", said, ("process",), restarts)


def _merged(each: Iterable[tuple[int, Metrics]]) -> Iterator[Family]:
    """Families of several processes as one of each name, with the process as a label."""
    found: dict[str, Family] = {}
    for number, metrics in each:
        for family in metrics.families:
            one = family if family.of_queue else family.with_label("process", str(number))
            before = found.get(one.name)
            if before is None:
                found[one.name] = one
            elif not one.of_queue:
                found[one.name] = replace(before, samples=[*before.samples, *one.samples])
    return iter(found.values())


def _ended(code: int) -> str:
    return f"ended with exit code {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"


def python_files(folder: Path) -> dict[Path, int]:
    """When each Python file below the folder was changed; without environments and hidden folders."""
    found: dict[Path, int] = {}
    for where, folders, names in os.walk(folder):
        folders[:] = [
            one
            for one in folders
            if one not in _SKIPPED and not one.startswith(".") and not Path(where, one, "pyvenv.cfg").exists()
        ]
        for name in names:
            if name.endswith(".py") and len(found) < _MOST_FILES:
                with contextlib.suppress(OSError):
                    found[Path(where, name)] = Path(where, name).stat().st_mtime_ns
    return found


def command_of(words: Sequence[str]) -> list[str]:
    """The command line of a process: this interpreter, and the words behind `postroom`."""
    return [sys.executable, "-m", "postroom", *words]
