"""Limits in messages and bytes a second, and how far each is spent (R40, I17).

The limits are part of the catalog: every change bumps its version, so that all brokers see it. How far they
are spent is progress that need not survive: a crash forgives some debt, a change of the limit all of it.
"""

from __future__ import annotations

from ...errors import UnknownGroup
from ...model.policy.rate import NOTHING, Rate, Spent, debt_us, give_back, spend
from .catalog.catalog import SqlCatalog, topic_of
from .session import Area, Session, Transaction, verbs

__all__ = ["SqlRates"]

_ALL = "SELECT name, messages_per_s, bytes_per_s FROM postroom_rates ORDER BY name"
_GROUP = """SELECT 1 FROM postroom_groups g JOIN postroom_topics t ON t.id = g.topic_id
            WHERE t.name = ? AND g.name = ?"""
_SPENT = "SELECT messages_at, bytes_at FROM postroom_spent WHERE name = ?"
_FIRST = "INSERT INTO postroom_spent (name, messages_at, bytes_at) VALUES (?, ?, ?)"
_AGAIN = "UPDATE postroom_spent SET messages_at = ?, bytes_at = ? WHERE name = ?"
_FORGET_US = 3_600_000_000  # what was spent so long ago is as good as nothing


@verbs
class SqlRates:
    def __init__(self, session: Session, catalog: SqlCatalog) -> None:
        self._session = session
        self._catalog = catalog
        self._put = session.dialect.upsert("postroom_rates", ("name",), ("messages_per_s", "bytes_per_s"))

    def set(self, rate: Rate) -> None:
        rate.check()
        topic, group, _ = rate.subject
        if group:
            self._catalog.group(topic, group)  # says what may have been meant
        with self._catalog.changing() as tx:
            if topic:
                topic_of(tx, topic)
            if group and tx.one(_GROUP, topic, group) is None:
                raise UnknownGroup(
                    f"group {group!r} of topic {topic!r} was just deleted", topic=topic, group=group
                )
            if rate.unlimited:
                tx.do("DELETE FROM postroom_rates WHERE name = ?", rate.name)
            else:
                tx.do(self._put, rate.name, rate.messages_per_s, rate.bytes_per_s)
        with self._session.write(Area.PROGRESS, flush=False) as tx:
            tx.do("DELETE FROM postroom_spent WHERE name = ?", rate.name)

    def all(self) -> list[Rate]:
        with self._session.read(Area.LOG) as tx:
            rows = tx.all(_ALL)
        return sorted(
            (Rate(name, float(messages), int(size)) for name, messages, size in rows), key=lambda r: r.name
        )

    def spend(
        self, rate: Rate, messages: int, bytes: int, *, owed_messages: int = 0, owed_bytes: int = 0
    ) -> int:
        with self._session.write(Area.PROGRESS, flush=False) as tx:
            spent, now_us, new = self._locked(tx, rate)
            if owed_messages or owed_bytes:
                spent, _ = spend(spent, rate, now_us, owed_messages, owed_bytes)
            after, usable_us = spend(spent, rate, now_us, messages, bytes)
            self._write(tx, rate, after, now_us, new)
        return -(-usable_us // 1000)

    def give_back(self, rate: Rate, messages: int, bytes: int) -> None:
        with self._session.write(Area.PROGRESS, flush=False) as tx:
            spent, now_us, new = self._locked(tx, rate)
            if not new:
                self._write(tx, rate, give_back(spent, rate, messages, bytes), now_us, new)

    def debts(self) -> dict[str, int]:
        rates = {rate.name: rate for rate in self.all()}
        with self._session.read(Area.PROGRESS) as tx:
            rows = tx.all("SELECT name, messages_at, bytes_at FROM postroom_spent")
            now_us = tx.now_ms() * 1000
        found: dict[str, int] = {}
        for name, *moments in rows:
            base = name.partition("@")[0] if name.startswith("group:") else name
            if base in rates:
                owed = -(-debt_us(Spent(*moments), rates[base], now_us) // 1000)
                found[base] = max(owed, found.get(base, 0))
        return {name: owed for name, owed in found.items() if owed}

    def _locked(self, tx: Transaction, rate: Rate) -> tuple[Spent, int, bool]:
        row = tx.locked(_SPENT, rate.name)
        return (Spent(*row) if row else NOTHING), tx.now_ms() * 1000, row is None

    def _write(self, tx: Transaction, rate: Rate, after: Spent, now_us: int, new: bool) -> None:
        if not new:
            tx.do(_AGAIN, after.messages_at, after.bytes_at, rate.name)
            return
        old = now_us - _FORGET_US
        tx.do("DELETE FROM postroom_spent WHERE messages_at < ? AND bytes_at < ?", old, old)
        tx.run(_FIRST, rate.name, after.messages_at, after.bytes_at)  # two at once: one looks again
