"""What the processes of one test run share: a folder with one server of each kind, and data folders to copy.

The process that the user started (with xdist, the controller) makes the folder and tells the others its path.
The first test that asks for a server starts it, under a lock; the others find its port in the folder. It is
not durable: a test of what survives takes a server of its own. It ends with the first process, not with the
one that started it: the watchdog of the folder sees to that, also after Ctrl-C and SIGKILL.
"""

from __future__ import annotations

import json
import os
import tempfile
from multiprocessing import util
from pathlib import Path
from typing import TypeVar

from .places import base_folder, memory_folder
from .server import Server, locked
from .watchdog import Watchdog

__all__ = ["Run"]

S = TypeVar("S", bound=Server)


class Run:
    """A run as one of its processes sees it: `Run.begin()` in the first, `Run(folder)` in those it starts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._watchdog: Watchdog | None = None
        self._started: list[Server] = []

    @classmethod
    def begin(cls) -> Run:
        """A new run, which ends with this process."""
        memory = memory_folder()
        run = cls(Path(tempfile.mkdtemp(prefix="postroom-tests-", dir=memory or base_folder())))
        run._watchdog = Watchdog(run.folder, "KILL")
        run.folder.chmod(0o711)  # servers run under accounts of their own
        run.pristine.mkdir(mode=0o711)
        if memory is not None:
            run._keep_temporary_files()
        return run

    def _keep_temporary_files(self) -> None:
        """Those of all tests, and their servers, are in our folder: thousands of small queues flush there."""
        folder = self.folder / "tmp"
        folder.mkdir()
        folder.chmod(0o1777)
        os.environ["TMPDIR"] = str(folder)  # which the processes of this run inherit
        tempfile.tempdir = None  # is asked for again

    @property
    def pristine(self) -> Path:
        return self.folder / "pristine"

    def server(self, kind: type[S]) -> S:
        """The one of its kind in this run."""
        folder = self.folder / kind.kind
        with locked(self.folder / f"{kind.kind}.lock"):
            known = self.folder / f"{kind.kind}.json"
            if known.exists():
                return kind.elsewhere(folder, **json.loads(known.read_text()))
            server = kind(durable=False, folder=folder)
            self._started.append(server)
            known.write_text(json.dumps({"port": server.port, "pid": server.pid}))
            return server

    def end(self) -> None:
        """Stops the servers and removes everything, if this process began the run."""
        for server in self._started:
            if self._watchdog is None:
                server.leave_running()
            else:
                server.close()
        if self._watchdog is not None:
            util._run_finalizers()  # multiprocessing removes its own folder, which is in ours, or complains
            self._watchdog.dismiss()
