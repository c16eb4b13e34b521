"""The outbox's rows, as the forwarder sees them, under the lease of the leading relay (I12, I21).

The lease and the stamps are in one row beside the table. Whoever takes the lease writes its own random name
there; every stamp and every delete first locks that row and looks whether the name still is its own. So a
relay that was stopped for longer than its lease, and goes on, changes nothing any more: what it still sends
has the stamp under which another relay has sent it, and is recognised. Time is that of the database (I16).

Rows are taken as they are there, the lowest ids first. Must never go by the highest id seen: a transaction
that began earlier may commit later.

Where the outbox is in the database of an embedded queue, a row leaves it in the transaction that stores its
message, for partitions that are flushed. Their stamps need not be durable: a row that is still there was not
stored, and one that is gone was. They are kept in memory, so that an append of unknown fate is repeated as it
was. Must never be done unless the queue's own session sees this relay's lease: that is how the two are known
to be one database.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any

import msgspec

from ...broker.broker import Broker
from ...broker.served import embedded
from ...config import DEFAULTS, ClientTuning
from ...endpoint.asking import AskingEndpoint
from ...endpoint.endpoint import Endpoint
from ...endpoint.operations import Operation
from ...endpoint.values import Beat, Held
from ...errors import LeaseLost
from ...model.delivery.delivery import Span
from ...model.messages.batch import read_header
from ...model.moves.forwarding import Batch, ForwardRow, Stamp
from ...store import SqlStore
from ...store.contract import Appended
from ...store.contract.values import Drawn
from .. import databases
from ..databases import Opening, Theirs
from .forwarder import Trouble
from .outbox_table import COLUMNS, OutboxStatus, Table, look, now_ms, row_of
from .transactions import begun

__all__ = ["DrawingEndpoint", "OutboxSource", "forget", "show"]


log = logging.getLogger("postroom.outbox")

_GAUGES = {
    "postroom_outbox_messages": "Messages committed in the outbox, and not sent yet.",
    "postroom_outbox_oldest_age_seconds": "Age of the oldest of them.",
    "postroom_outbox_stuck_topics": "Topics that can take none of their messages until somebody acts.",
}
_made: list[Any] | None = None


def show(status: OutboxStatus) -> None:
    """Set the figures of an outbox for Prometheus, if the relay's process has `prometheus_client` (R43).

    Called by the leading relay alone, in the process's default registry, under the names that a served broker
    uses for an outbox in its own database. Must never fail a relay.
    """
    values = (status.messages, status.oldest_age_ms / 1000, len(status.stuck))
    for gauge, value in zip(_gauges(), values, strict=False):
        gauge.labels(status.table).set(value)


def forget(table: str) -> None:
    """Another relay leads: its process has the figures now."""
    for gauge in _made or ():
        with suppress(KeyError):
            gauge.remove(table)


def _gauges() -> list[Any]:
    global _made
    if _made is None:
        try:
            from prometheus_client import Gauge

            _made = [Gauge(name, text, ["table"]) for name, text in _GAUGES.items()]
        except (ImportError, ValueError) as error:  # it is not there; or somebody has these names already
            log.debug("an outbox has no figures for Prometheus: %r", error)
            _made = []
    return _made


Stamped = list[tuple[str, int, int, int, list[int]]]
"""Topic, the three numbers of the stamp, and the ids of the rows."""

_AT_ONCE = 500  # ids in one statement
_SILENT_LEASES = 20  # a lease that nobody renews for so many of one's own is of another time
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Stamped).decode


class OutboxSource:
    """Of one relay. Used in one thread, which its connection belongs to."""

    def __init__(
        self,
        table: Table,
        opening: Opening,
        lease_ms: int,
        holder: str,
        way: DrawingEndpoint | None = None,
        *,
        tuning: ClientTuning = DEFAULTS.tuning.client,
    ) -> None:
        """`way`: where the queue's own database may be the outbox's."""
        self.table, self._opening, self._lease_ms = table, opening, lease_ms
        self.holder, self._way = holder, way
        self._measure_s = tuning.measure_s
        self.leading = False
        self.idle = threading.Event()  # not set: rows were taken, and what became of them is not known yet
        self.stopping = False
        self._renew_at = self._measure_at = self._seen_at = 0.0  # by the monotonic clock
        self._seen = ("", 0)  # another's lease, as it was since then
        self._connection: Any = None

    # ---- what the forwarder asks ----

    def take(self, messages: int, size: int, without: Collection[str]) -> list[ForwardRow]:
        """Nothing, unless this relay leads, and goes on."""
        self.idle.set()
        if self.stopping or not self._leads():
            return []
        found = self._take(messages, size, without)
        if found:
            self.idle.clear()
        return found

    def _take(self, messages: int, size: int, without: Collection[str]) -> list[ForwardRow]:
        with self._reading() as theirs:
            self._measure()
            holder, stamped = self._relay_row(theirs, "holder, stamped")
            if holder != self.holder:
                raise _lost()
            resumed = [one for one in _unpacked(stamped) if one[0] not in without]
            drawn = self._drawn_before(theirs, without) if not resumed else []
            if drawn:
                return drawn
            found = [row for one in resumed for row in self._rows_of(theirs, one)]
            if found or not resumed:
                return found or self._oldest(theirs, messages, size, without)
        self._drop(resumed)  # somebody has deleted all of their rows
        return self._take(messages, size, without)

    def stamp(self, batches: Sequence[Batch]) -> None:
        if self._way is not None:
            drawn = [batch for batch in batches if self._way.draws(batch.stamp.partition_id)]
            self._way.open.update((batch.stamp, batch) for batch in drawn)
            batches = [batch for batch in batches if batch.stamp not in self._way.open]
        added = [(batch.topic, *batch.stamp, [row.id for row in batch.rows]) for batch in batches]
        if added:
            with self._leading() as (theirs, stamped):
                self._write(theirs, "stamped", _encode([*stamped, *added]))

    def finish(self, stored: Sequence[Batch], refused: Sequence[Batch]) -> None:
        if self._way is not None:  # their rows are gone, or may go in another batch
            kept = self._way.open
            drawn = {batch.stamp for batch in (*stored, *refused) if kept.pop(batch.stamp, None)}
            stored = [batch for batch in stored if batch.stamp not in drawn]
            refused = [batch for batch in refused if batch.stamp not in drawn]
        if stored or refused:
            self._finish(stored, {batch.stamp for batch in (*stored, *refused)})
        self.idle.set()

    def _finish(self, stored: Sequence[Batch], done: Collection[Stamp]) -> None:
        with self._leading() as (theirs, stamped):
            left = [one for one in stamped if Stamp(*one[1:4]) not in done]
            self._write(theirs, "stamped", _encode(left) if left else None)
            for some in _chunks(row.id for batch in stored for row in batch.rows):
                theirs.run(f"DELETE FROM {self.table.name} WHERE id IN ({_marks(some)})", some)

    def tell(self, topic: str, trouble: Trouble | None) -> None:
        with self._leading() as (theirs, _):
            (text,) = self._relay_row(theirs, "stuck")
            known = {} if text is None else json.loads(bytes(text))
            known.pop(topic, None)
            if trouble is not None:
                known[topic] = {"reason": trouble.reason, "stuck": trouble.stuck, "since": now_ms(theirs)}
            self._write(theirs, "stuck", json.dumps(known).encode() if known else None)

    def _drawn_before(self, theirs: Theirs, without: Collection[str]) -> list[ForwardRow]:
        """Rows of an append of unknown fate: those that are still there were not stored."""
        found: list[ForwardRow] = []
        open_ = {} if self._way is None else self._way.open
        for stamp, batch in list(open_.items()):
            if batch.topic not in without:
                ids = [row.id for row in batch.rows]
                rows = self._rows_of(theirs, (batch.topic, *stamp, ids), gone=True)
                if not rows:
                    del open_[stamp]
                found += rows
        return found

    def _drop(self, gone: Stamped) -> None:
        with self._leading() as (theirs, stamped):
            left = [one for one in stamped if one not in gone]
            self._write(theirs, "stamped", _encode(left) if left else None)

    # ---- rows ----

    def _rows_of(
        self, theirs: Theirs, stamped: tuple[str, int, int, int, list[int]], *, gone: bool = False
    ) -> list[ForwardRow]:
        """All rows of a stamp. One that somebody took away by hand would make another batch of it."""
        found: list[ForwardRow] = []
        for some in _chunks(stamped[4]):
            sql = f"SELECT id, {COLUMNS} FROM {self.table.name} WHERE id IN ({_marks(some)}) ORDER BY id"
            found += [row_of(row, Stamp(*stamped[1:4])) for row in theirs.rows(sql, some)]
        if len(found) != len(stamped[4]) and (found or not gone):
            log.error(
                "%d rows of %s are gone that were about to be sent to topic %r: somebody has deleted them",
                len(stamped[4]) - len(found), self.table.name, stamped[0],
            )  # fmt: skip
        return found

    def _oldest(self, theirs: Theirs, messages: int, size: int, without: Collection[str]) -> list[ForwardRow]:
        held = list(without)
        other = f" WHERE topic NOT IN ({_marks(held)})" if held else ""
        ahead = f"SELECT id, size FROM {self.table.name}{other} ORDER BY id LIMIT {messages}"
        count = total = 0
        for _, one in theirs.rows(ahead, held):
            total += one
            if count and total > size:
                break
            count += 1
        if not count:
            return []
        sql = f"SELECT id, {COLUMNS} FROM {self.table.name}{other} ORDER BY id LIMIT {count}"
        return [row_of(row) for row in theirs.rows(sql, held)]

    # ---- the lease ----

    def _leads(self) -> bool:
        """Take or renew the lease. A look without a lock first: most who ask are refused."""
        if self.leading and time.monotonic() < self._renew_at:
            return True
        with self._reading() as theirs:
            version, holder, until = self._relay_row(theirs, "version, holder, until_ms")
            self.table.check_version(version)
            if holder != self.holder and (self.leading or self._lasts(holder, until, now_ms(theirs))):
                return self._refused()
        asked = time.monotonic()
        with self._begun() as theirs:
            holder, until = self._relay_row(theirs, "holder, until_ms", lock=True)
            now = now_ms(theirs)
            if holder != self.holder and (self.leading or self._lasts(holder, until, now)):
                return self._refused()
            sql = f"UPDATE {self.table.relay} SET holder = ?, until_ms = ? WHERE id = 1"
            theirs.run(sql, [self.holder, now + self._lease_ms])
        self.leading, self._renew_at = True, asked + self._lease_ms / 3000
        if self._way is not None:
            self._way.leads()
        return True

    def _lasts(self, holder: str, until: int, now: int) -> bool:
        """Whether a lease has not passed. One that nobody renews for long is of a clock that was set back
        since: whoever has it is gone, or changes nothing any more (I26)."""
        if (holder, until) != self._seen:
            self._seen, self._seen_at = (holder, until), time.monotonic()
        return now < until and time.monotonic() - self._seen_at < _SILENT_LEASES * self._lease_ms / 1000

    def _refused(self) -> bool:
        if self.leading:
            raise _lost()
        return False

    @contextmanager
    def _leading(self) -> Iterator[tuple[Theirs, Stamped]]:
        """A transaction that holds the lease's row, and what is stamped. LeaseLost: it is another's."""
        with self._begun() as theirs:
            holder, stamped = self._relay_row(theirs, "holder, stamped", lock=True)
            if holder != self.holder:
                raise _lost()
            yield theirs, _unpacked(stamped)

    def _relay_row(self, theirs: Theirs, columns: str, *, lock: bool = False) -> tuple[Any, ...]:
        if lock and theirs.kind == "sqlite":  # some libraries begin there with a write, and not before
            theirs.run(f"UPDATE {self.table.relay} SET id = id WHERE id = 1")
        suffix = " FOR UPDATE" if lock and theirs.kind != "sqlite" else ""
        found = theirs.rows(f"SELECT {columns} FROM {self.table.relay} WHERE id = 1{suffix}")
        if not found:
            raise self.table.missing()
        return found[0]

    def _write(self, theirs: Theirs, column: str, value: bytes | None) -> None:
        theirs.run(f"UPDATE {self.table.relay} SET {column} = ? WHERE id = 1", [value])

    def _measure(self) -> None:
        if time.monotonic() >= self._measure_at:
            self._measure_at = time.monotonic() + self._measure_s
            show(look(self.table, self._connection))

    # ---- the connection ----

    def check(self) -> None:
        """SchemaMismatch: the table is missing, or of another version."""
        try:
            with self._reading() as theirs:
                self.table.check_version(self._relay_row(theirs, "version")[0])
                theirs.rows(f"SELECT id, {COLUMNS} FROM {self.table.name} LIMIT 1")
        finally:
            self.close()

    def leave(self) -> None:
        """Give the lease back, so that others need not wait for its end, and let go of the connection."""
        try:
            if self.leading and self._connection is not None:
                with self._leading() as (theirs, _):
                    theirs.run(f"UPDATE {self.table.relay} SET holder = '', until_ms = 0 WHERE id = 1")
        finally:
            self.close()

    def close(self) -> None:
        if self.leading:
            forget(self.table.name)
        self.leading = False
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    @contextmanager
    def _begun(self) -> Iterator[Theirs]:
        """One transaction."""
        connection = self._open()
        with self.table.explaining(), begun(connection):
            yield databases.of(connection)

    @contextmanager
    def _reading(self) -> Iterator[Theirs]:
        """Statements that change nothing; what they began is ended."""
        connection = self._open()
        try:
            with self.table.explaining():
                yield databases.of(connection)
        finally:
            if databases.library(connection) != "django":
                connection.rollback()

    def _open(self) -> Any:
        if self._connection is None:
            self._connection = self._opening()
        return self._connection


def _lost() -> LeaseLost:
    return LeaseLost("another relay leads this outbox now")


def _unpacked(stamped: Any) -> Stamped:
    return [] if stamped is None else _decode(bytes(stamped))


def _chunks(ids: Iterable[int]) -> Iterator[list[int]]:
    left = iter(ids)
    while some := list(islice(left, _AT_ONCE)):
        yield some


def _marks(values: Sequence[Any]) -> str:
    return ", ".join("?" * len(values))


class DrawingEndpoint(AskingEndpoint):
    """The queue's own broker, for the forwarder, and what the source asks and tells. From any thread."""

    def __init__(self, broker: Broker, store: SqlStore, table: str, holder: str) -> None:
        self._broker, self._store = broker, store
        self._table, self._holder = table, holder
        self._same: bool | None = None  # database; None: not looked at yet
        self._volatile: dict[int, bool] = {}
        self.open: dict[Stamp, Batch] = {}  # sent by this way, and not confirmed yet

    @staticmethod
    def over(endpoint: Endpoint, table: str, holder: str) -> DrawingEndpoint | None:
        """None: the queue is served, has several shards, or is of a kind of its own."""
        broker = embedded(endpoint)
        if broker is None or not isinstance(broker.store, SqlStore):
            return None
        return DrawingEndpoint(broker, broker.store, table, holder)

    # ---- for the source; blocking ----

    def leads(self) -> None:
        """This relay has the lease now: look whether the queue sees it."""
        if self._same is None:
            self._same = self._store.outboxes.leads(self._table, self._holder)

    def draws(self, partition_id: int) -> bool:
        """Whether rows for this partition leave by this way."""
        if not self._same:
            return False
        if partition_id not in self._volatile:
            self._volatile[partition_id] = self._store.log.is_volatile(partition_id)
        return not self._volatile[partition_id]

    # ---- for the forwarder ----

    async def append(
        self,
        topic: str,
        partition_id: int,
        batch: bytes,
        *,
        due_at: int = 0,
        ids: bytes = b"",
        producer: str = "",
    ) -> Appended:
        return await self._broker.append(
            topic,
            partition_id,
            batch,
            due_at=due_at,
            ids=ids,
            producer=producer,
            drawn=self._drawn(partition_id, batch),
        )

    def _drawn(self, partition_id: int, batch: bytes) -> Drawn | None:
        """The rows that leave with this batch; None: it was stamped in the table."""
        header = read_header(batch)
        found = self.open.get(Stamp(header.producer_id, partition_id, header.base_sequence))
        if found is None:
            return None
        return Drawn(self._table, self._holder, tuple(row.id for row in found.rows))

    async def _ask(self, operation: Operation, arguments: dict[str, Any]) -> Any:
        return await getattr(self._broker, operation.name)(**arguments)

    def beat(self, beats: Sequence[Beat]) -> list[tuple[Held, tuple[Span, ...]]]:
        return self._broker.beat(beats)

    def now_ms(self) -> int:
        return self._broker.now_ms()

    def reached_ms(self) -> int:
        return self._broker.reached_ms()

    async def close(self) -> None:
        """The broker lives on: it is the connection's."""
