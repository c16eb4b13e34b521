"""An ack in the user's own transaction, where the store is in the user's database (R33).

The same lock, the same decision and the same statements as every ack, run on the user's connection: they are
committed or rolled back with the user's own work. From here to that end the group's progress in the partition
is locked, so it is to be the last thing before the commit: polls and acks of others wait there, within their
lock time-outs, and on PostgreSQL a process that stands still before its commit is cut off as ours are (I15;
MySQL has no limits that end with a transaction). Nobody waits for us who has something that we still need:
one row is locked, and the deliveries below it.

Durable as the user's commit is: at least as I8 asks of an ack. On MySQL every read locks: at the default
isolation a plain one would see the deliveries as they were when the user's transaction began (I1). Must never
begin, commit or roll back; and must never settle what the token does not hold now (I7).

Beside a guard (`once`) and an ack after the commit it is one commit in the place of two, and no row to be
kept: 5.9 ms in the place of 6.3 on PostgreSQL, 8.7 in the place of 12.5 on MariaDB (`bench.guards`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

from ....config import Limits
from ....errors import GenerationChanged, UsageError
from ....model.delivery import ordered, settlement
from ....model.delivery.delivery import Kind, Settlement
from ...contract.values import Group
from ..identity import uuid_of
from ..session import Row, Session, Transaction
from .locked import Locked, NeedsStartError, lock

__all__ = ["Guest", "Joining", "Joins"]

_UUID = "SELECT value FROM postroom_settings WHERE name = 'uuid'"
# until the transaction ends, and only where the user has no limits of his own
_UNLESS_SET = "CASE WHEN current_setting('{0}') = '0' THEN set_config('{0}', ?, true) END"
_LIMITED = _UUID.replace(
    "value",
    f"value, {_UNLESS_SET.format('lock_timeout')}, "
    f"{_UNLESS_SET.format('idle_in_transaction_session_timeout')}",
)
_KINDS = {"postgresql": "postgres", "mysql": "mysql"}


class Guest(Protocol):
    """A connection of the user's, in a transaction."""

    @property
    def kind(self) -> str: ...
    def rows(self, sql: str, args: Sequence[Any] = ()) -> list[tuple[Any, ...]]: ...
    def run(self, sql: str, args: Sequence[Any] = ()) -> int: ...
    def many(self, sql: str, rows: Sequence[Sequence[Any]]) -> None: ...


@runtime_checkable
class Joins(Protocol):
    """A progress whose acks may join the user's transaction."""

    def ack_within(self, guest: Guest, group: Group, partition_id: int, token: int, offset: int) -> bool:
        """Settle one message in the user's transaction; False: the token does not hold it any more.

        UsageError: the user's connection is to another database than the partition's shard, or the store's
        progress cannot be reached through it.
        """


class Joining:
    def __init__(self, session: Session, limits: Limits) -> None:
        self._session = session
        self._timeouts = (str(limits.lock_timeout_ms), str(limits.idle_timeout_ms))

    @cached_property
    def _uuid(self) -> str:
        return uuid_of(self._session)

    def ack(self, guest: Guest, group: Group, partition_id: int, token: int, offset: int) -> bool:
        self._check_same(guest)
        tx = _GuestTransaction(self._session.dialect, guest)
        try:
            locked = Locked(tx, group, partition_id, lock(tx, (group.id, partition_id)), None, False)
        except (NeedsStartError, GenerationChanged):  # the group was reset: it is nobody's any more
            return False
        settle = ordered.settle if group.settings.mode == "ordered" else settlement.settle
        done = Settlement(Kind.ACK, offset, offset)
        change = settle(locked.held(token), [done], locked.now, group.terms, locked.row.cursor)
        if change.missing:
            return False
        locked.apply(change)
        locked.save()
        return True

    def _check_same(self, guest: Guest) -> None:
        kind = self._session.dialect.kind
        if kind not in _KINDS:
            raise UsageError(
                "ack(connection=) needs a queue on PostgreSQL, MySQL or MariaDB: on SQLite progress is in a "
                "file of its own, which your transaction cannot reach; use postroom.guards.once instead"
            )
        if guest.kind != _KINDS[kind] or self._uuid_there(guest) != self._uuid:
            raise UsageError(
                "this connection is not to the database that the queue is in (same server, database and "
                "schema), so the ack cannot join its transaction: connect to that one, or use "
                "postroom.guards.once instead"
            )

    def _uuid_there(self, guest: Guest) -> str:
        try:
            if guest.kind == "postgres":  # with limits for what is locked from now on (I15)
                return str(guest.rows(_LIMITED, self._timeouts)[0][0])
            return str(guest.rows(_UUID)[0][0])
        except Exception as error:
            if "exist" not in str(error):
                raise
            return ""  # no such table: it is another database, or another schema


class _GuestTransaction(Transaction):
    """The store's statements on the user's connection, which knows its driver's parameters itself."""

    __slots__ = ()

    connection: Guest

    def all(self, sql: str, *args: Any) -> list[Row]:
        locks = self.dialect.kind == "mysql" and "FOR UPDATE" not in sql
        return self.connection.rows(f"{sql} FOR UPDATE" if locks else sql, args)

    def one(self, sql: str, *args: Any) -> Row | None:
        return next(iter(self.all(sql, *args)), None)

    def locked(self, sql: str, *args: Any) -> Row | None:
        found = self.one(f"{sql}{self.dialect.for_update}", *args)
        self._now = self.dialect.time_ms()
        assert self._now is not None, "the store was opened, and read its clock"
        return found

    def run(self, sql: str, *args: Any) -> int:
        return self.connection.run(sql, args)

    def do(self, sql: str, *args: Any) -> None:
        self.connection.run(sql, args)

    def many(self, sql: str, rows: Sequence[Row]) -> None:
        self.connection.many(sql, rows)
