"""Who waits for news, and how news from other processes is noticed.

A long poll registers before it looks, so nothing falls between the look and the wait, and it holds no
database connection while it waits. News in this process comes straight from the writer and from
settling. News from other processes comes from one watcher thread, which looks only while somebody waits.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Literal, Protocol

from ..config import DEFAULTS, Limits
from ..errors import PostroomError
from ..store.contract import News, Store, Watcher

__all__ = ["Awaited", "Key", "Listener", "Waiters", "WatcherThread", "wait"]

Key = tuple[str, int]
"""("partition", id) or ("group", id)."""

Awaited = Callable[[str], Sequence[int] | None]
"""The ids of a kind of key that somebody waits for; None: all of them."""

Found = Literal["nothing", "ours", "news"]

_MOST_NAMED = 2000
_CALMING = 8  # a watcher pauses for one part in so many of the time since the last news

_log = logging.getLogger("postroom.broker")


class Listener(Protocol):
    """What is told of news: of one key, or of anything."""

    def told(self, key: Key) -> None: ...

    def set(self) -> None: ...


class _NewsEvent(asyncio.Event):
    def told(self, key: Key) -> None:
        self.set()


class Waiters:
    """Events by key. Used in the event loop only."""

    def __init__(self, lull_s: float = DEFAULTS.tuning.broker.lull_s) -> None:
        """`lull_s`: nobody waited for so long: what other processes did meanwhile may not be known. A shorter
        time is no lull: a watcher that is wanted again within its `watcher_kept_s` tells all that was
        committed since it was last asked."""
        self._lull_s = lull_s
        self._events: dict[Key, set[Listener]] = {}
        self._count = 0
        self.lulls = 0  # how often nobody waited for so long that news of other processes may be missed
        self._left_at = -lull_s
        self._watched = False
        self._resting: asyncio.TimerHandle | None = None
        self.on_first: Callable[[], None] = lambda: None  # somebody waits now
        self.on_none: Callable[[], None] = lambda: None  # nobody has waited for a while

    @contextmanager
    def listening(self, keys: Iterable[Key]) -> Iterator[asyncio.Event]:
        """An event that is set by news on any of the keys."""
        event, keys = _NewsEvent(), list(keys)
        self.listen(event, keys)
        self.enter()
        try:
            yield event
        finally:
            self.leave()
            self.ignore(event, keys)

    def enter(self) -> None:
        """Somebody waits, until it calls `leave`: news of other processes are looked for."""
        self._count += 1
        if self._count == 1:
            self.lulls += time.monotonic() - self._left_at >= self._lull_s
            if not self._watched:
                self._watched = True
                self.on_first()

    def leave(self) -> None:
        """Whoever waits for one message after the other is back soon: a watcher is not stopped for that."""
        self._count -= 1
        if not self._count:
            self._left_at = time.monotonic()
            if self._resting is None:
                self._rest_in(self._lull_s)

    def _rest_in(self, seconds: float) -> None:
        self._resting = asyncio.get_running_loop().call_later(seconds, self._rest)

    def _rest(self) -> None:
        self._resting = None
        left_s = self._left_at + self._lull_s - time.monotonic()
        if self._count:
            return
        if left_s > 0:
            return self._rest_in(left_s)
        self._watched = False
        self.on_none()

    def listen(self, listener: Listener, keys: Iterable[Key]) -> None:
        for key in keys:
            self._events.setdefault(key, set()).add(listener)

    def ignore(self, listener: Listener, keys: Iterable[Key]) -> None:
        for key in keys:
            listeners = self._events.get(key, set())
            listeners.discard(listener)
            if not listeners:
                self._events.pop(key, None)

    def notify(self, *keys: Key) -> None:
        for key in keys:
            for listener in self._events.get(key, ()):
                listener.told(key)

    def listens(self, key: Key) -> bool:
        return key in self._events

    def awaited(self, kind: str) -> list[int] | None:
        """Partitions, or groups, that somebody listens to; None: so many that all may be read. Any thread."""
        try:
            keys = list(self._events)
        except RuntimeError:  # the event loop has put something there just now
            return None
        found = [id for one, id in keys if one == kind]
        return found if len(found) <= _MOST_NAMED else None

    def notify_all(self) -> None:
        for listener in {listener for listeners in self._events.values() for listener in listeners}:
            listener.set()


async def wait(news: asyncio.Event, seconds: float) -> None:
    """Not `wait_for`, which may swallow a cancellation that comes together with the news."""
    try:
        async with asyncio.timeout(max(0.0, seconds)):
            await news.wait()
    except TimeoutError:
        pass


class OthersWatch:
    """Whether anybody else has committed, asked by the event loop while nobody but this process does.

    The loop has connections to SQLite of its own, which tell that in 20 us. A look of the watcher's thread
    takes 500, and the loop waits for the interpreter meanwhile: 50 a second made each message late by 0.4 ms.
    Used by one thread; its timer runs in the loop.
    """

    def __init__(self, store: Store, every_s: float, heeded: Callable[[], bool] = lambda: False) -> None:
        """`heeded`: somebody waits for what this process commits itself, too."""
        self._store, self._every_s, self._heeded = store, every_s, heeded
        self._loop = asyncio.get_running_loop()
        self._version: Hashable | None = None
        self._asking: asyncio.TimerHandle | None = None
        self._begun, self._ended = threading.Event(), threading.Event()
        self._able = store.at_once is not None
        self._wanted = self._closed = False

    def begin(self, patience_s: float) -> bool:
        """From now on others are noticed: who looks after this sees all that they have done before. False:
        that cannot be told, or is not all, or the loop has no time for so long."""
        self._begun.clear()
        self._ended.clear()
        if not self._able or self._closed or self._heeded():
            return False
        self._wanted = True
        with suppress(RuntimeError):  # the loop was closed
            self._loop.call_soon_threadsafe(self._begin)
            if self._begun.wait(patience_s) and not self._ended.is_set():
                return True
        self._wanted = False
        return False

    def wait(self, seconds: float) -> None:
        """Until somebody else has committed, for so long at most."""
        self._ended.wait(seconds)
        self._wanted = False

    def close(self) -> None:
        """End a wait, and all that come; from any thread."""
        self._closed = True
        self._ended.set()

    def _begin(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
        self._version = self._ask_store()
        self._ask_again()
        self._begun.set()

    def _ask(self) -> None:
        if self._wanted and (self._heeded() or self._ask_store() != self._version):
            self._version = None
        self._ask_again()

    def _ask_again(self) -> None:
        self._asking = None
        if self._version is None:
            self._ended.set()
        elif self._wanted:
            self._asking = self._loop.call_later(self._every_s, self._ask)

    def _ask_store(self) -> Hashable | None:
        assert self._store.at_once is not None, "nobody begins otherwise"
        try:
            with self._store.at_once():
                version = self._store.others_version()
        except PostroomError:  # the thread meets it, and tells
            return None
        self._able = version is not None
        return version


class WatcherThread:
    """A watcher looks for commits of other processes while somebody waits here, and tells the event loop.

    It asks the store every `watch_interval_ms` while there is news, and less and less often when there is
    none: it pauses for an eighth of the time since the last news, `watch_cap_ms` at most. So what another
    process sends is late by an eighth of the silence before it, and a consumer that has nothing to do costs a
    tenth. News in this process does not come this way, and a store that waits for news itself (PostgreSQL,
    SQLite on Linux) is asked again at once. Where a file only tells that somebody has committed, and that was
    this process, it is asked again after an eighth of the time since the last news of others; once that is
    `watcher_own_s`, the event loop asks that often who it was (`OthersWatch`), and the thread sleeps.
    """

    def __init__(
        self,
        store: Store,
        limits: Limits,
        report: Callable[[News | None, dict[int, int] | None], None],
    ) -> None:
        self._store = store
        self._interval_s, self._cap_s = limits.watch_interval_ms / 1000, limits.watch_cap_ms / 1000
        self._kept_s = limits.tuning.broker.watcher_kept_s
        self._failure_s = limits.tuning.broker.watcher_failure_s
        self.on_due: Callable[[int], None] = lambda due_at: None  # in this thread: the next delayed message
        self.awaited: Awaited = lambda kind: None  # whose news are read
        self.stored_here: Callable[[int, int], bool] = lambda partition_id, end: False
        self._own_s = limits.tuning.broker.watcher_own_s
        self._asleep_s = limits.tuning.broker.watcher_asleep_s
        self.heeds_own: Callable[[], bool] = lambda: False  # whether its own commits are news to somebody
        self._others = OthersWatch(store, self._own_s, lambda: self.heeds_own())
        self._seen: News | None = None  # what was read last
        self._report = report  # (news of log and catalog, when groups have something due); None: as before
        self._loop = asyncio.get_running_loop()
        self._failing = False
        self._unsure = True  # nobody watched just now
        self._wanted = threading.Event()
        self._guard = threading.Lock()
        self._wanted_by: set[str] = set()
        self._stopping = threading.Event()
        self._watcher: Watcher | None = None  # what this thread asks
        self._thread = threading.Thread(target=self._run, name="postroom-watcher", daemon=True)
        self._thread.start()

    def resume(self, who: str = "waiters") -> None:
        with self._guard:
            self._wanted_by.add(who)
            self._wanted.set()

    def pause(self, who: str = "waiters") -> None:
        with self._guard:
            self._wanted_by.discard(who)
            if not self._wanted_by and not self._stopping.is_set():
                self._wanted.clear()

    async def close(self) -> None:
        self._stopping.set()
        self._wanted.set()
        with self._guard:
            if self._watcher is not None:
                self._watcher.wake()
        self._others.close()
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            if self._stopping.is_set():
                return
            self._watch()

    def _watch(self) -> None:
        """Until nobody has wanted it for a while: what nobody reads would pile up somewhere."""
        self._unsure = True
        try:
            watcher = self._watcher = self._store.watch()
        except PostroomError as error:
            return self._failed(error)
        asked_at = news_at = others_at = time.monotonic()
        found: Found = "nothing"
        try:
            while self._wanted.wait(self._kept_s) and not self._stopping.is_set():
                now = time.monotonic()
                calm_s = min(self._cap_s, (now - news_at) / _CALMING)
                if found == "ours":
                    calm_s = max(calm_s, min(self._own_s, (now - others_at) / _CALMING))
                pause_s = calm_s - (now - asked_at)
                if pause_s > self._interval_s:
                    self._stopping.wait(pause_s)
                else:
                    time.sleep(self._interval_s)  # half of what it costs to wait for an event
                if self._stopping.is_set():
                    return
                alone = found == "ours" and time.monotonic() - others_at >= _CALMING * self._own_s
                alone = alone and self._others.begin(self._asleep_s)
                asked_at = time.monotonic()
                found = self._look(watcher.changed)
                if found != "nothing":
                    news_at = time.monotonic()
                if found == "news":
                    others_at = news_at
                if alone:
                    self._others.wait(self._asleep_s if found == "ours" else 0)
        finally:
            with self._guard:  # it must not be woken once it is closed
                self._watcher = None
            watcher.close()

    def _failed(self, error: PostroomError) -> None:
        if not self._failing:
            _log.warning("cannot look for news of other processes, trying again: %s", error)
        self._failing = self._unsure = True
        self._stopping.wait(self._failure_s)

    def _look(self, changed: Callable[[], tuple[bool, bool]]) -> Found:
        """Report what was committed since the last time; returns whether anything was, and if all of it was
        by this process, as far as one can see."""
        try:
            log, progress = changed()
            if self._unsure:  # who knows what was missed
                log = progress = True
            if not log and not progress:
                return "nothing"
            # asked for after `changed`: who began to listen later looks later, and sees what was committed
            news = self._store.log.news(self.awaited("partition")) if log else None
            dues = self._store.progress.dues(self.awaited("group")) if progress else None
            if news is not None and news.next_due is not None:
                self.on_due(news.next_due)
        except PostroomError as error:
            self._failed(error)
            return "nothing"
        if self._failing:
            _log.info("news of other processes are seen again")
        self._failing = self._unsure = False
        with suppress(RuntimeError):  # the loop was closed: nobody waits there any more
            self._loop.call_soon_threadsafe(self._report, news, dues)
        return "ours" if news is None or self._is_ours(news) else "news"

    def _is_ours(self, news: News) -> bool:
        before, self._seen = self._seen, news
        return (
            before is not None
            and before.catalog_version == news.catalog_version
            and before.next_due == news.next_due
            and all(
                end == before.ends.get(partition_id) or self.stored_here(partition_id, end)
                for partition_id, end in news.ends.items()
            )
        )
