"""The audit log: a row for each administrative action, the oldest of which make room (`model.audit`).

Few rows, written when somebody changes the queue and never on the way of a message; so there is no index but
the id, and lists are read from the newest back. What is a single transaction itself, a principal's change,
has its row in that transaction (`note`); all else is begun first and completed afterwards.
"""

from __future__ import annotations

import msgspec

from ....model.audit import BEGUN, Asker, AuditEntry, State, Told, short, stored_state
from ..lists import blanks, parts
from ..session import Area, Row, Session, Transaction, verbs

__all__ = ["SqlAudit", "note"]

_COLUMNS = (
    "begun_at, who, door, address, action, topic, group_name, outcome, asked, state_before, state_after"
)
_INSERT = f"INSERT INTO postroom_audit ({_COLUMNS}) VALUES ({blanks(11)})"
_END = "UPDATE postroom_audit SET outcome = ?, state_before = ?, state_after = ? WHERE id = ?"
_BY_WHOM = "SELECT who, COUNT(*) FROM postroom_audit GROUP BY who"
_TRIMMED_EVERY = 50  # entries: a few more than the most there may be are no harm


def note(
    tx: Transaction,
    by: Asker,
    action: str,
    topic: str,
    group: str,
    outcome: str,
    asked: State,
    before: State | None,
    after: State | None,
) -> int:
    """Write an entry in this transaction; returns its id."""
    names = map(short, (by.who, by.door, by.address, action, topic, group, outcome))
    states = (stored_state(asked), stored_state(before), stored_state(after))
    return tx.insert(_INSERT, tx.now_ms(), *names, *states)


@verbs
class SqlAudit:
    def __init__(self, session: Session) -> None:
        self._session = session

    def begin(
        self, by: Asker, action: str, topic: str, group: str, asked: State, before: State | None, most: int
    ) -> int:
        with self._session.write(Area.LOG) as tx:
            id = note(tx, by, action, topic, group, BEGUN, asked, before, None)
            if id % _TRIMMED_EVERY == 0:
                _make_room(tx, most)
        return id

    def end(self, id: int, outcome: str, before: State | None, after: State | None) -> None:
        with self._session.write(Area.LOG) as tx:
            tx.do(_END, short(outcome), stored_state(before), stored_state(after), id)

    def drop(self, id: int) -> None:
        with self._session.write(Area.LOG) as tx:
            tx.do("DELETE FROM postroom_audit WHERE id = ?", id)

    def entries(
        self, *, limit: int, topic: str = "", who: str = "", since: int = 0, before: int = 0, after: int = 0
    ) -> list[AuditEntry]:
        wanted = {
            "topic = ?": topic, "who = ?": who, "begun_at >= ?": since, "id < ?": before, "id > ?": after,
        }  # fmt: skip
        given = {condition: value for condition, value in wanted.items() if value}
        where = f" WHERE {' AND '.join(given)}" if given else ""
        with self._session.read(Area.LOG) as tx:
            rows = tx.all(
                f"SELECT id, {_COLUMNS} FROM postroom_audit{where} ORDER BY id DESC LIMIT ?",
                *given.values(), limit,
            )  # fmt: skip
        return list(map(_entry, rows))

    def trim(self, begun_before: int, most: int) -> int:
        with self._session.write(Area.LOG) as tx:
            old = tx.run("DELETE FROM postroom_audit WHERE begun_at < ?", begun_before)
            return old + _make_room(tx, most)


def _make_room(tx: Transaction, most: int) -> int:
    """Forget what is beyond the most: of whoever has more than half of it, else the oldest of all."""
    counts = {str(who): int(number) for who, number in tx.all(_BY_WHOM)}
    beyond = sum(counts.values()) - most
    if beyond <= 0:
        return 0
    busiest = max(counts, key=lambda who: counts[who])
    mine = min(beyond, counts[busiest] - most // 2)
    if mine > 0:
        _forget_oldest(tx, mine, busiest)
    if beyond > max(0, mine):
        _forget_oldest(tx, beyond - max(0, mine))
    return beyond


def _forget_oldest(tx: Transaction, number: int, who: str = "") -> None:
    where, args = (" WHERE who = ?", (who,)) if who else ("", ())
    found = tx.all(f"SELECT id FROM postroom_audit{where} ORDER BY id LIMIT ?", *args, number)
    for some in parts([int(row[0]) for row in found]):
        tx.do(f"DELETE FROM postroom_audit WHERE id IN ({blanks(len(some))})", *some)


def _entry(row: Row) -> AuditEntry:
    id, at, who, door, address, action, topic, group, outcome, *states = row
    asked, before, after = map(_state, states)
    return AuditEntry(
        id, at, who, door, address, action, topic, group, outcome, asked or {}, before, after
    )  # fmt: skip


_decode_state = msgspec.json.Decoder(dict[str, Told]).decode


def _state(text: str) -> dict[str, Told] | None:
    return _decode_state(text) if text else None
