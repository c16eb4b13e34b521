"""A database server of our own in a temporary folder: made, started, stopped, killed, removed.

What PostgreSQL and MariaDB have in common. Servers refuse to run as root, so root starts them as another
user; any other user starts them as himself. They run with real durability, for tests of what survives, but
for the one that all tests of a run share (see `run`). They listen on loopback only, and keep their port for
life, so that a client finds them again.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import itertools
import os
import signal
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, Self, TypedDict
from urllib.parse import quote

from .places import HOST, account, base_folder, free_port
from .processes import kill_tree
from .watchdog import Watchdog, note

__all__ = ["Mode", "Server", "locked"]

Mode = Literal["fast", "immediate"]


_numbers = itertools.count(1)


class _Surroundings(TypedDict, total=False):
    cwd: Path
    env: dict[str, str]
    user: int
    group: int
    extra_groups: list[int]


class Server(ABC):
    kind: ClassVar[str]
    scheme: ClassVar[str]
    accounts: ClassVar[Sequence[str]]  # who runs it when we are root: the first that exists
    signals: ClassVar[dict[Mode, signal.Signals]]
    user: ClassVar[str] = "postroom"  # owns its databases and may do nothing else
    admin: ClassVar[str]
    _pid: int | None = None  # of one that runs elsewhere
    password: ClassVar[str] = "p@ss:w/rd%"  # has to be quoted in a URL, as real ones have to
    pristine: ClassVar[Path | None] = None  # where data folders are that no server has run on; set by a run

    def __init__(self, *, durable: bool = True, folder: Path | None = None) -> None:
        """`folder`: a new one within a folder that has a watchdog already."""
        self.durable = durable
        self._account = account(self.accounts)
        self._process: subprocess.Popen[bytes] | None = None
        self._watchdog: Watchdog | None = None
        if folder is None:
            self.folder = self._new_folder()
            self._watchdog = Watchdog(self.folder, self._last_signal)
        else:
            self.folder = folder
            folder.mkdir(mode=0o700)
        try:
            self._hand_over(self.folder)
            self._make_data()
            self.port = self._start_on_a_free_port()
            self._create_user()
        except BaseException:
            self.close()
            raise

    @classmethod
    def elsewhere(cls, folder: Path, port: int, pid: int) -> Self:
        """One that another process started and that will be stopped for us: we connect to it, no more."""
        server = cls.__new__(cls)
        server.folder, server.port, server._pid, server._process = folder, port, pid, None
        return server

    # --- what differs ---------------------------------------------------------------------------------

    @abstractmethod
    def _initialize(self) -> None:
        """Make `data`, with all settings that are kept there."""

    @abstractmethod
    def _command(self, port: int) -> list[str | Path]: ...

    @abstractmethod
    def _ready(self, port: int) -> bool:
        """Whether it takes connections."""

    @abstractmethod
    def _create_user(self) -> None: ...

    @abstractmethod
    def create_database(self) -> str:
        """A new, empty database in which `user` may do everything: its name."""

    @abstractmethod
    def drop_database(self, name: str) -> None:
        """Also when somebody is still connected to it."""

    @abstractmethod
    def connect(self, database: str, *, port: int | None = None, admin: bool = False) -> Any:
        """With the driver, no Postroom in between. Arguments as for `url`."""

    @abstractmethod
    def _free_memory(self) -> None:
        """What a killed server left outside its folder, now that it will not be started again."""

    # --- life -----------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        if self._process is not None:
            return self._process.pid
        if self._pid is None:
            raise RuntimeError(f"{self.kind} does not run; call start()")
        return self._pid

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def start(self, *, timeout_s: float = 60) -> None:
        """On the same port and data as before. Returns when it takes connections."""
        if self.runs:
            raise RuntimeError(f"{self.kind} runs already; call stop() or kill() first")
        for attempts_left in (4, 3, 2, 1, 0):
            try:
                return self._launch(self.port, timeout_s)
            except _StartFailed as failed:  # another test process looks whether the port is free
                if attempts_left == 0 or "in use" not in str(failed):
                    raise
                time.sleep(0.2)

    def stop(self, mode: Mode = "fast", *, timeout_s: float = 60) -> None:
        """`fast`: in order, without waiting for clients. `immediate`: at once; the next start recovers."""
        os.kill(self.pid, self.signals[mode])
        assert self._process is not None
        self._process.wait(timeout_s)
        self._gone()

    def kill(self) -> None:
        """A crash: all its processes at once, nothing tidied up."""
        assert self._process is not None, f"{self.kind} does not run"
        kill_tree(self.pid)
        self._process.wait()
        self._gone()

    def restart(self, mode: Mode = "fast") -> None:
        self.stop(mode)
        self.start()

    def close(self) -> None:
        """End it and remove everything. May be called twice."""
        try:
            if self._process is not None:
                self.stop("immediate", timeout_s=10)
        except subprocess.TimeoutExpired:
            self.kill()
        finally:
            self._free_memory()
            if self._watchdog is not None:
                self._watchdog.dismiss()

    def leave_running(self) -> None:
        """It outlives this process, on purpose: the watchdog of the folder above ends it."""
        assert self._process is not None
        self._process.returncode = 0  # or Python warns that nobody waits for its end

    def url(self, database: str, *, port: int | None = None, admin: bool = False) -> str:
        """`port`: of a proxy in between. `admin`: as the one who may do everything."""
        user = self.admin if admin else self.user
        return f"{self.scheme}://{user}:{quote(self.password, safe='')}@{HOST}:{port or self.port}/{database}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- for subclasses -------------------------------------------------------------------------------

    def _run(self, command: Iterable[str | Path]) -> None:
        """A program that prepares something, as the server's user."""
        done = subprocess.run(
            list(command), capture_output=True, text=True, timeout=120, **self._surroundings()
        )
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(map(str, done.args))} failed:\n{done.stdout}{done.stderr}")

    def _new_name(self) -> str:
        return f"postroom_{os.getpid()}_{next(_numbers)}"  # other processes may use the server too

    # --- inside ---------------------------------------------------------------------------------------

    @property
    def _last_signal(self) -> str:
        return self.signals["immediate"].name.removeprefix("SIG")

    def _new_folder(self) -> Path:
        return Path(tempfile.mkdtemp(prefix=f"postroom-{self.kind}-", dir=base_folder()))

    def _hand_over(self, folder: Path) -> None:
        if self._account is not None:
            os.chown(folder, self._account.pw_uid, self._account.pw_gid)

    def _make_data(self) -> None:
        """Made in full once in a run, then copied, which takes a tenth of the time."""
        folder = (Server.pristine or _pristine_of_process()) / self.kind
        with locked(folder.with_suffix(".lock")):
            made = folder / self.data.name
            if made.exists():
                self._run(["cp", "-a", made, self.data])
                return
            self._initialize()
            folder.mkdir(mode=0o700, exist_ok=True)
            self._hand_over(folder)
            self._run(["cp", "-a", self.data, folder / "unfinished"])
            (folder / "unfinished").rename(made)

    def _surroundings(self) -> _Surroundings:
        """Nothing of the folders of whoever runs the tests, and messages in a language we can read."""
        own: dict[str, str] = {"HOME": str(self.folder), "TMPDIR": str(self.folder), "LC_ALL": "C"}
        here: _Surroundings = {"cwd": self.folder, "env": {**os.environ, **own}}
        if self._account is None:
            return here
        return {
            **here,
            "user": self._account.pw_uid,
            "group": self._account.pw_gid,
            "extra_groups": [],
        }

    def _start_on_a_free_port(self) -> int:
        """Between our look and the server's bind another test process may take the port: try another one."""
        for attempts_left in (2, 1, 0):
            port = free_port()
            try:
                self._launch(port, timeout_s=60)
                return port
            except _StartFailed as failed:
                if attempts_left == 0 or "in use" not in str(failed):
                    raise
        raise AssertionError("unreachable")

    def _launch(self, port: int, timeout_s: float) -> None:
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                self._command(port),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C in a terminal is for the tests; they stop the server then
                **self._surroundings(),
            )
        self._process = process
        note(self.folder, process.pid, self._last_signal)
        deadline = time.monotonic() + timeout_s
        while not self._ready(port):
            if process.poll() is not None:
                self._gone()
                raise _StartFailed(f"{self.kind} ended while starting; its log ends:\n{self._last_words()}")
            if time.monotonic() > deadline:
                self.kill()
                raise _StartFailed(
                    f"{self.kind} did not start in {timeout_s} s; its log:\n{self._last_words()}"
                )
            time.sleep(0.02)

    def _gone(self) -> None:
        self._process = None
        note(self.folder, None, self._last_signal)

    def _last_words(self, lines: int = 20) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


class _StartFailed(RuntimeError):
    pass


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Against other processes."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@functools.cache
def _pristine_of_process() -> Path:
    """Where no run of tests has one: in a benchmark."""
    folder = Path(tempfile.mkdtemp(prefix="postroom-pristine-", dir=base_folder()))
    folder.chmod(0o711)
    atexit.register(Watchdog(folder, "KILL").dismiss)
    return folder
