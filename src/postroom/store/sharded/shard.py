"""One database of a queue that is on several: it answers, or it is away (R6).

Every verb on a shard goes through here. One that finds the database unavailable marks the shard as away: from
then on nobody waits for its time-outs any more, verbs fail at once, and a thread of its own knocks until it
answers again. An error belongs to the shard that raised it first: a verb that needs two of them never marks
the wrong one. A database that takes our bytes and never answers is found by a watchdog: it asks on a
connection of its own, and if that is not answered either, ends the wait of all who are there.

A shard that was away from the beginning is opened, and its identity checked, when it answers for the first
time. Must never retry a verb: what became of it is its caller's to find out (I2).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, cast

from ...address import FIRST_SHARD
from ...config import StoreTuning
from ...errors import PostroomError, StoreUnavailable
from ...model.delivery.delivery import Delivery, Holder, Settlement
from ...model.delivery.ordered import FAR
from ...model.policy.bounds import make_room
from ...model.topology.route import Range
from ..contract import (
    Access,
    Append,
    Audit,
    Brokers,
    Duties,
    Granted,
    Lanes,
    Log,
    Peek,
    Progress,
    Rates,
    Routes,
    Schedule,
    Settled,
    Staging,
    Usage,
    Visit,
    Visited,
    Watcher,
)
from ..contract.kafka import KafkaGroups
from ..sql.log.id_window import Windows
from ..sql.log.log import SqlLog
from ..sql.session import Area
from .table import SqlPlaces, SqlShards

if TYPE_CHECKING:
    from .. import SqlStore
    from ..sql.catalog.catalog import SqlCatalog

__all__ = ["Shard", "Shards", "Skew", "Watchdog", "shown"]


class Skew:
    """How far a shard's clock is ahead, and times of the shard as the rest of the queue counts them (I16).

    Leases, due times and holders are decided by the clock of the shard they are on. Whoever asks counts by
    the first shard's clock: so moments that go to a shard, or come from it, are moved by how far the two are
    apart.

    Without it a delayed message is as late as its shard's clock is behind: a minute. It costs a microsecond a
    verb where clocks agree (`bench.mechanisms`). A shard whose clock is wrong is not refused: it would be
    unreachable for as long as nobody mends the clock.
    """

    __slots__ = ("_ms",)

    def __init__(self, shard_ms: int | None, first_ms: int | None, near_ms: int) -> None:
        """`near_ms`: clocks that agree so far are left alone."""
        apart = 0 if shard_ms is None or first_ms is None else shard_ms - first_ms
        self._ms = apart if abs(apart) > near_ms else 0

    def __bool__(self) -> bool:
        return self._ms != 0

    # ---- to the shard ----

    def there(self, moment: int) -> int:
        return moment + self._ms if 0 < moment < FAR else moment

    def appends(self, appends: Sequence[Append]) -> Sequence[Append]:
        if not self or not any(append.due_at for append in appends):
            return appends
        return [replace(append, due_at=self.there(append.due_at)) for append in appends]

    def settlements(self, settlements: Sequence[Settlement]) -> Sequence[Settlement]:
        if not self:
            return settlements
        return [replace(one, visible_at=self.there(one.visible_at)) for one in settlements]

    def visit(self, visit: Visit) -> Visit:
        if not self or not visit.settles:
            return visit
        return replace(visit, settles=[(token, self.settlements(some)) for token, some in visit.settles])

    def delivery_there(self, delivery: Delivery) -> Delivery:
        return replace(delivery, visible_at=self.there(delivery.visible_at)) if self else delivery

    # ---- from the shard ----

    def here(self, moment: int) -> int:
        return moment - self._ms if 0 < moment < FAR else moment

    def due(self, moment: int | None) -> int | None:
        return None if moment is None else self.here(moment)

    def delivery(self, delivery: Delivery) -> Delivery:
        return replace(delivery, visible_at=self.here(delivery.visible_at)) if self else delivery

    def delivery_or_none(self, delivery: Delivery | None) -> Delivery | None:
        return None if delivery is None else self.delivery(delivery)

    def deliveries(self, deliveries: tuple[Delivery, ...]) -> tuple[Delivery, ...]:
        return tuple(map(self.delivery, deliveries)) if self else deliveries

    def delivery_list(self, deliveries: list[Delivery]) -> list[Delivery]:
        return list(map(self.delivery, deliveries)) if self else deliveries

    def stopped(self, stopped: list[Delivery]) -> list[Delivery]:
        return [replace(one, failing_since=self.here(one.failing_since)) for one in stopped]

    def peeks(self, peeks: dict[int, Peek]) -> dict[int, Peek]:
        return {one: self.peek(peek) for one, peek in peeks.items()}

    def peek(self, peek: Peek) -> Peek:
        if not self:
            return peek
        return replace(peek, next_due=self.due(peek.next_due), holder=self._holder(peek.holder))

    def granted(self, granted: Granted) -> Granted:
        if not self:
            return granted
        return replace(
            granted,
            deliveries=self.deliveries(granted.deliveries),
            leaving=self.deliveries(granted.leaving),
            next_due=self.due(granted.next_due),
            holder=None if granted.holder is None else self._holder(granted.holder),
        )

    def settled(self, settled: Settled) -> Settled:
        if not self:
            return settled
        return replace(settled, leaving=self.deliveries(settled.leaving), kept=self.deliveries(settled.kept))

    def visited(self, visited: Visited | StoreUnavailable) -> Visited | StoreUnavailable:
        if not self or isinstance(visited, StoreUnavailable):
            return visited
        granted = visited.granted and self.granted(visited.granted)
        return Visited(tuple(map(self.settled, visited.settled)), granted)

    def _holder(self, holder: Holder) -> Holder:
        return replace(holder, until=self.here(holder.until))


_log = logging.getLogger("postroom.store")


_MOST_HOMES = 100_000  # partitions of which is known where they are

_TOLD = {"refused": "the connection is refused", "read_only": "it is read-only", "lost": "it was lost"}
"""What clients of a broker are told of an error, by its `reason`: addresses are none of their business."""


def shown(name: str) -> str:
    """A shard's name for people."""
    return name or FIRST_SHARD


class Shard:
    """`opening` opens its database and checks that it is the right one."""

    def __init__(self, name: str, kind: str, opening: Callable[[], SqlStore], tuning: StoreTuning) -> None:
        self._tuning = tuning
        self.name, self.kind = name, kind
        self._opening = opening
        self._opened: SqlStore | None = None
        self._away: PostroomError | None = None
        self._guard = threading.Lock()
        self._closing = threading.Event()
        self._under_way: dict[object, float] = {}  # verbs, and when they began
        self.on_return: Callable[[], None] = lambda: None
        self.alone = False  # the queue has no other
        # parts of its store, each verb of which fails at once while it is away
        self.log = cast(Log, _Part(self, "log"))
        self.catalog = cast("SqlCatalog", _Part(self, "catalog"))
        self.routes = cast(Routes, _Part(self, "routes"))
        self.progress = cast(Progress, _Part(self, "progress"))
        self.usage = cast(Usage, _Part(self, "usage"))
        self.schedule = cast(Schedule, _Part(self, "schedule"))
        self.duties = cast(Duties, _Part(self, "duties"))
        self.brokers = cast(Brokers, _Part(self, "brokers"))
        self.access = cast(Access, _Part(self, "access"))
        self.audit = cast(Audit, _Part(self, "audit"))
        self.rates = cast(Rates, _Part(self, "rates"))
        self.lanes = cast(Lanes, _Part(self, "lanes"))
        self.staging = cast(Staging, _Part(self, "staging"))
        self.kafka_groups = cast(KafkaGroups, _Part(self, "kafka_groups"))
        self.places = cast(SqlPlaces, _Part(self, "places"))
        self.table = cast(SqlShards, _Part(self, "table"))

    @property
    def is_away(self) -> bool:
        return self._away is not None

    def take(self, store: SqlStore) -> None:
        """Take a database that is open already."""
        self._opened = store

    def open_later(self, why: PostroomError) -> None:
        """Open the database later, when it answers."""
        self._lost(why)

    def now_ms(self) -> int | None:
        """Its clock, without asking; None: it has never answered."""
        return None if (opened := self._opened) is None else opened.now_ms()

    def watch(self) -> Watcher:
        return cast(Watcher, _Watching(self, self._run(lambda: self._store.watch())))

    def close(self) -> None:
        self._closing.set()
        with self._guard:
            store, self._opened = self._opened, None
        if store is not None:
            store.close()

    # ---- verbs ----

    def part(self, name: str) -> Any:
        store = self._store
        if name == "places":
            return SqlPlaces(store.session)
        return SqlShards(store.session) if name == "table" else getattr(store, name)

    @property
    def opened(self) -> SqlStore:
        """Also while it is away; StoreUnavailable if it never answered."""
        if (opened := self._opened) is None:
            raise self._error()
        return opened

    @property
    def _store(self) -> SqlStore:
        if self._away is not None:
            error = self._error()
            error.details["stored"] = False  # nothing has begun
            raise error
        return self.opened

    def _error(self) -> StoreUnavailable:
        away = f"shard {shown(self.name)!r} is away, and its partitions wait for it"
        if self.alone:
            away = "the database is away"
        known = {} if self._away is None else self._away.details
        reason = known.get("reason")
        why = known.get("_served") or _TOLD.get(str(reason), "it does not answer")
        return StoreUnavailable(
            f"{away} ({self._away}); check its database: it is asked again every second",
            shard=self.name,
            _served=f"{away} ({why}); ask the operator of the brokers, who finds more in their logs",
            **({} if reason is None else {"reason": reason}),
        )

    def _run(self, call: Callable[[], Any]) -> Any:
        ticket = object()
        self._under_way[ticket] = time.monotonic()
        try:
            return call()
        except StoreUnavailable as error:
            if "shard" not in error.details:
                error.details["shard"] = self.name
                self._lost(error)
                error.details["_served"] = self._error().details["_served"]
            raise
        finally:
            del self._under_way[ticket]

    # ---- away ----

    def look_for_a_hang(self) -> None:
        """Whoever waits for long asks whether it answers at all; if not, nobody waits any longer (I15)."""
        began = min(list(self._under_way.values()), default=None)
        opened = self._opened
        if (
            began is None
            or opened is None
            or self.is_away
            or time.monotonic() - began < self._tuning.shard_slow_s
        ):
            return
        session, answered = opened.session, threading.Event()

        def ask() -> None:
            with suppress(PostroomError):
                session.knock()
                answered.set()

        threading.Thread(target=ask, name=f"postroom-shard-{self.name}", daemon=True).start()
        if not answered.wait(self._tuning.shard_answer_s) and not self._closing.is_set():
            error = StoreUnavailable(
                f"it has not answered for {time.monotonic() - began:.0f} s", reason="no_answer"
            )
            self._lost(error)
            session.break_off(error)

    def _lost(self, error: PostroomError) -> None:
        with self._guard:
            if self._away is not None or self._closing.is_set():
                return
            self._away = error
        _log.warning("shard %r is away; its partitions wait, the others go on: %s", shown(self.name), error)
        threading.Thread(target=self._knock, name=f"postroom-shard-{self.name}", daemon=True).start()

    def _knock(self) -> None:
        pauses = chain(self._tuning.shard_knock_s, repeat(self._tuning.shard_knock_s[-1]))
        while not self._closing.wait(next(pauses)):
            try:
                self._look()
            except PostroomError as error:
                if self._closing.is_set():
                    return
                if not isinstance(error, StoreUnavailable) and str(error) != str(self._away):
                    _log.error("shard %r answers, and cannot be used: %s", shown(self.name), error)
                self._away = error
            else:
                self._away = None
                _log.info("shard %r is back", shown(self.name))
                self.on_return()
                return

    def _look(self) -> None:
        if (opened := self._opened) is not None:  # `close` may take it away meanwhile
            opened.session.knock()
            with opened.session.read(Area.LOG) as tx:
                tx.one("SELECT value FROM postroom_settings WHERE name = 'uuid'")
            return
        store = self._opening()
        with self._guard:
            if not self._closing.is_set():
                self._opened = store
                return
        store.close()


def _added_later(name: str, tuning: StoreTuning) -> Shard:
    def opening() -> SqlStore:
        raise AssertionError("it has no address")

    shard = Shard(name, "", opening, tuning)
    shard._away = StoreUnavailable(
        f"it was added to the queue after this process had connected: connect again, with shards={{{name!r}: "
        "'its address'}} as well",
        _served="this broker was not given its address",
    )
    return shard


class Watchdog:
    """Looks for shards that hang, in a thread of its own."""

    def __init__(self, shards: Iterable[Shard], every_s: float) -> None:
        self._every_s = every_s
        self._shards = tuple(shards)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="postroom-watchdog", daemon=True)
        self._thread.start()

    def add(self, shard: Shard) -> None:
        self._shards = (*self._shards, shard)

    def stop(self) -> None:
        self._stopping.set()

    def _run(self) -> None:
        while not self._stopping.wait(self._every_s):
            for shard in self._shards:
                shard.look_for_a_hang()


class _Part:
    """The verbs of one part of a shard's store."""

    def __init__(self, shard: Shard, part: str) -> None:
        self._shard, self._part = shard, part

    def __getattr__(self, verb: str) -> Any:
        shard, part = self._shard, self._part

        def call(*args: Any, **kwargs: Any) -> Any:
            return shard._run(lambda: getattr(shard.part(part), verb)(*args, **kwargs))

        setattr(self, verb, call)
        return call


class _Watching:
    """A watcher of a shard."""

    def __init__(self, shard: Shard, watcher: Watcher) -> None:
        self._shard, self._watcher = shard, watcher

    def changed(self) -> tuple[bool, bool]:
        found: tuple[bool, bool] = self._shard._run(self._watcher.changed)
        return found

    def wake(self) -> None:
        self._watcher.wake()

    def close(self) -> None:
        self._watcher.close()


class Shards(Mapping[str, Shard]):
    """All of a queue, by name; "" is the first, where the catalog is. A partition never changes its shard."""

    def __init__(self, shards: Iterable[Shard], tuning: StoreTuning) -> None:
        self.tuning, self._near_ms = tuning, tuning.skew_ms
        self._shards = {shard.name: shard for shard in shards}
        self._unknown: dict[str, Shard] = {}  # another process has added them
        self._homes: dict[int, str] = {}  # of partitions, as far as somebody asked

    def add(self, shard: Shard) -> None:
        """One more; whoever goes through them at that moment sees those that were there."""
        self._shards = {**self._shards, shard.name: shard}
        self._unknown.pop(shard.name, None)

    def __getitem__(self, name: str) -> Shard:
        found = self._shards.get(name) or self._unknown.get(name)
        if found is None:
            found = self._unknown[name] = _added_later(name, self.tuning)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._shards)

    def __len__(self) -> int:
        return len(self._shards)

    @property
    def first(self) -> Shard:
        return self._shards[""]

    def others(self) -> list[Shard]:
        return [shard for name, shard in self._shards.items() if name]

    def present(self) -> list[Shard]:
        return [shard for shard in self._shards.values() if not shard.is_away]

    def name_of(self, partition_id: int) -> str:
        name = self._homes.get(partition_id)
        if name is None:
            name = self.first.table.shard_of(partition_id)
            if name is None:
                return ""  # it is gone, and whoever looks there will say so
            make_room(self._homes, _MOST_HOMES)
            self._homes[partition_id] = name
        return name

    def known(self, partition_id: int) -> str | None:
        """Return a partition's shard without asking; None if nobody has asked yet."""
        return self._homes.get(partition_id)

    def of(self, partition_id: int) -> Shard:
        return self[self.name_of(partition_id)]

    def skew(self, shard: Shard) -> Skew:
        """How far its clock is from the first one's; nothing is asked."""
        known = (shard.now_ms(), self.first.now_ms()) if shard.name else (None, None)
        return Skew(*known, self._near_ms)

    def learn(self, pieces: Iterable[Range]) -> None:
        """Read in the catalog."""
        make_room(self._homes, _MOST_HOMES)
        self._homes.update((piece.partition_id, piece.shard) for piece in pieces)

    def windows_of(self, partition_id: int) -> Windows:
        """The ids that a partition has seen; in memory also while its shard is away."""
        log = self.of(partition_id).opened.log
        assert isinstance(log, SqlLog), "shards are SQL databases"
        return log.windows

    def split(self, partition_ids: Iterable[int]) -> dict[Shard, list[int]]:
        """By shard, in the order of the ids."""
        found: dict[Shard, list[int]] = {}
        for partition_id in partition_ids:
            found.setdefault(self.of(partition_id), []).append(partition_id)
        return found
