"""An app as a program: found by its name, and run until a signal comes.

Decides what "module:app" names, and says what was probably meant if it names nothing. The first SIGINT or
SIGTERM lets handlers end, the second hands back what they are at. Must never leave the process's signal
handlers changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import logging
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from difflib import get_close_matches
from pathlib import Path
from time import monotonic
from types import ModuleType
from typing import Any

from ...backoff import SLOW
from ...config import DEFAULTS
from ...errors import PostroomError, UsageError
from ...sync.portal import loop_factory
from .app import App

__all__ = ["Beside", "find", "load_app", "run"]

log = logging.getLogger("postroom.app")


def load_app(target: str) -> App:
    """The app that "module:app" names."""
    app: App = find(target, App)
    return app


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


Beside = Callable[[App], AbstractAsyncContextManager[Callable[[], None]]]
"""What runs beside an app, from before its start to its end; it yields what is called once it has started."""


def run(app: App, *, create: bool = False, beside: Beside | None = None) -> None:
    """Run the app as a program until a signal comes; with `create`, its missing topics are created.

    A queue that cannot be reached is waited for. The first SIGINT or SIGTERM lets handlers end (within the
    app's grace), the second hands back what they are at. Must never leave the process's signal handlers
    changed.
    """
    if not app.subscriptions and not app.outboxes:
        raise UsageError("the app has no handlers: register some with @app.subscribe(…)")
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_run(app, create, beside or _nothing))


@contextlib.asynccontextmanager
async def _nothing(app: App) -> AsyncIterator[Callable[[], None]]:
    yield lambda: None


async def _run(app: App, create: bool, beside: Beside) -> None:
    told, ending = 0, asyncio.Event()
    stopping: list[asyncio.Task[None]] = []

    def tell() -> None:
        nonlocal told
        told += 1
        ending.set()
        log.info(
            "shutting down; waiting for running handlers"
            if told == 1
            else "second signal: cancelling handlers; their messages return to the queue"
        )
        stopping.append(asyncio.create_task(app.stop(None if told == 1 else 0)))

    with _signals(tell):
        async with beside(app) as started:
            if await _started(app, create, ending):
                started()
                await _until_stopped(app, stopping)


async def _until_stopped(app: App, stopping: list[asyncio.Task[None]]) -> None:
    relaying = [f"the relay of {outbox.table.name}" for outbox, _, _ in app.outboxes]
    log.info("running %s", ", ".join([*(one.name for one in app.subscriptions), *relaying]))
    try:
        await app.wait()
    finally:
        await app.stop()
        await asyncio.gather(*stopping)


async def _started(app: App, create: bool, ending: asyncio.Event) -> bool:
    """Start the app, and wait for a queue that cannot be reached; False: a signal came first.

    A file is not waited for: one that cannot be opened is a mistake in its name, or in its rights.
    """
    told = _Told(DEFAULTS.tuning.client.queue_told_s)
    for tries in itertools.count(1):
        try:
            await app.start(create=create)
        except PostroomError as error:
            if not error.retriable or app._on_file:
                raise
            app._trouble = f"the queue cannot be reached ({error.code}); it is tried again"
            pause_s = SLOW.after(tries)
            told.tell(f"the queue cannot be reached: {error}; it is tried again until it can")
        else:
            app._trouble = None
            if ending.is_set():
                await app.stop()
            return not ending.is_set()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ending.wait(), pause_s)
        if ending.is_set():
            return False
    raise AssertionError("it is tried again for ever")


class _Told:
    """Warns of what is new, and again of the same after a while."""

    def __init__(self, again_s: float) -> None:
        self._again_s, self._said, self._at = again_s, "", 0.0

    def tell(self, said: str) -> None:
        if said != self._said or monotonic() - self._at > self._again_s:
            self._said, self._at = said, monotonic()
            log.warning("%s", said)


@contextlib.contextmanager
def _signals(tell: Callable[[], None]) -> Iterator[None]:
    """Signals while the app runs; in another thread than the main one there are none to be had."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    before: dict[signal.Signals, Any] = {number: signal.getsignal(number) for number in _SIGNALS}
    for number in _SIGNALS:
        try:
            loop.add_signal_handler(number, tell)
        except NotImplementedError:  # Windows
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(tell))
    try:
        yield
    finally:
        for number, handler in before.items():
            with contextlib.suppress(NotImplementedError):
                loop.remove_signal_handler(number)
            signal.signal(number, handler)


def find(target: str, kind: type) -> Any:
    """What "module:name" names, if it is of that kind."""
    module_name, colon, name = target.partition(":")
    if not module_name or not colon or not name:
        raise UsageError(f"{target!r} names no app: write module:app, such as orders:app for orders.py")
    module = _module(module_name, target)
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if isinstance(found, kind):
        return found
    apps = [key for key, value in vars(module).items() if isinstance(value, kind)]
    hint = f"it has {', '.join(f'{module_name}:{key}' for key in apps)}" if apps else "it has no App at all"
    what = "there is none of that name" if found is None else f"that is {type(found).__name__}, not an App"
    file = getattr(module, "__file__", None) or "a module that comes with Python"
    raise UsageError(f"{target!r}: {what} in module {module_name} ({file}); {hint}")


def _module(name: str, target: str) -> ModuleType:
    if name.endswith(".py") or "/" in name:
        meant = name.removesuffix(".py").strip("./").replace("/", ".")
        raise UsageError(f"{target!r}: name the module, not the file: {meant}:{target.partition(':')[2]}")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise  # the module is there; something it imports is not
        close = get_close_matches(name, _modules_here(), n=1)
        meant = f"did you mean {close[0]}?" if close else "is it in this folder, or installed?"
        raise UsageError(f"{target!r}: there is no module {error.name!r}; {meant}") from None


def _modules_here() -> list[str]:
    return [path.stem for path in Path.cwd().glob("*.py")]
