"""Links: the connection of this process to a queue, shared by all of kombu's connections to it.

Opened when it is first used, closed with its last user. Threads share it, and so their sends share batches.

Decides what a forked child does. It cannot use the parent's connection. On a database server, or at a broker,
it opens its own. A SQLite file is another matter: SQLite keeps locks per process in its own memory, which the
child inherits, so a file that was open before the fork must not be opened in the child: when the parent
closes it, commits of the child are lost. So a parent that has one open serves it at this machine's own
address, under a random token, before it forks, and the child connects to its parent.

Must never touch the parent's connection in a child, nor block longer than a call does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from ...address import parse
from ...client.connection import Connection, connect
from ...config import DEFAULTS
from ...errors import ClosedError, ForkError
from ...sync.portal import LoopThread

__all__ = ["Link"]

log = logging.getLogger("postroom.celery")

T = TypeVar("T")
_Key = tuple[str, tuple[tuple[str, Any], ...]]

_OPTIONS = ("token", "tls", "migrate", "zone")


class Link:
    """A connection, the thread that runs it, and how many use it."""

    def __init__(self, key: _Key, url: str, options: Mapping[str, Any]) -> None:
        self.key, self.pid = key, os.getpid()
        self.users = 0
        self.embedded_file = parse(url).kind in ("sqlite", "memory")
        self.served: tuple[str, str] | None = None  # address and token for children
        self._thread = LoopThread(lambda _, value: value)
        try:
            self.mq: Connection = self._thread.call(connect(url, **options)._opened)
        except BaseException:
            self._thread.end()
            raise

    @property
    def usable(self) -> bool:
        return self.pid == os.getpid() and not self._thread.closed

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._thread._loop

    def run(self, function: Callable[..., Awaitable[T]], *args: Any, **how: Any) -> T:
        """Call it in the connection's loop and wait for it; also from a thread that runs another loop."""
        if self.pid != os.getpid():
            raise ForkError("this connection belongs to the parent process: connect again in the child")
        if self._thread.closed:
            raise ClosedError("this connection is closed: connect again")

        async def call() -> T:
            return await function(*args, **how)

        future = asyncio.run_coroutine_threadsafe(call(), self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # where the wait was interrupted; what is done is not changed by it
            raise

    def soon(self, function: Callable[..., Any], *args: Any) -> None:
        """Call it in the connection's loop without waiting; not at all once that has ended."""
        if self.usable:
            with contextlib.suppress(RuntimeError):
                self.loop.call_soon_threadsafe(function, *args)

    def close(self) -> None:
        try:
            self.run(self.mq.close)
        finally:
            self._thread.end()

    def serve(self) -> None:
        """For children: only they know the token."""
        if self.served is None and self.usable and threading.current_thread() is not self._thread._thread:
            token = secrets.token_urlsafe(24)
            serving = asyncio.run_coroutine_threadsafe(self.mq.serve("127.0.0.1", 0, token=token), self.loop)
            self.served = (serving.result(DEFAULTS.tuning.client.interrupted_s).url, token)


class _Links:
    """The links of this process."""

    def __init__(self) -> None:
        self._parents: dict[_Key, tuple[str, str] | None] = {}  # files that the parent has open, and its door
        self._forget()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(before=self._before_fork, after_in_child=self._in_child)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[_Key, Link] = {}

    def _before_fork(self) -> None:
        for link in [one for one in list(self._open.values()) if one.embedded_file]:
            try:
                link.serve()
            except Exception as error:
                log.error("child processes cannot use %s: %r", link.key[0], error)

    def _in_child(self) -> None:
        self._parents |= {link.key: link.served for link in self._open.values() if link.embedded_file}
        self._forget()  # without closing: they are the parent's

    def take(self, url: str, options: Mapping[str, Any]) -> Link:
        given = {name: options[name] for name in _OPTIONS if options.get(name) is not None}
        key = (url, tuple(sorted(given.items(), key=str)))
        with self._lock:
            link = self._open.get(key)
            if link is None or not link.usable:
                link = self._open[key] = Link(key, *self._way(key, url, given))
            link.users += 1
            return link

    def _way(self, key: _Key, url: str, given: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        if key not in self._parents:
            return url, given
        door = self._parents[key]
        if door is None:
            raise ForkError(
                f"{url} was open when this process was forked, and SQLite loses commits where both open it: "
                "publish before the fork from no other process than this, or use a broker (postroom serve)"
            )
        return door[0], {"token": door[1]}

    def give_back(self, link: Link) -> None:
        with self._lock:
            if not link.usable:
                return
            link.users -= 1
            if link.users:
                return
            if self._open.get(link.key) is link:
                del self._open[link.key]
        link.close()


_links = _Links()
take, give_back = _links.take, _links.give_back
