"""The demo's figures, all measured, and whether they are what the queue promises."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from .ledger import Audit

__all__ = ["Figures", "Pipeline"]

_NOTHING = Audit(0, 0, 0, 0, 0)


@dataclass(slots=True)
class Pipeline:
    """What the jobs on Spark found."""

    archived: int = 0
    table: str = ""
    audited: int = 0
    verdict: str = ""
    bad: dict[str, int] = field(default_factory=dict)  # messages, by stage and kind
    nothing_bad: bool = False  # but for what was handled twice: at-least-once delivery may do that
    agrees: bool = False  # the audit, with what the demo counted by itself
    report: str | None = None  # a file with what is bad
    plan: str | None = None  # a file, if there is something to split
    steps: int = 0  # of the plan
    seconds: float = 0.0

    @property
    def well(self) -> bool:
        return self.nothing_bad and self.agrees

    def fields(self) -> dict[str, Any]:
        return {**asdict(self), "seconds": round(self.seconds, 2)}


@dataclass(slots=True)
class Figures:
    url: str
    shown: str  # the same without a password
    sent: int = 0
    sent_per_s: float = 0.0
    billing: Audit = _NOTHING
    search: Audit = _NOTHING
    deaths: int = 0  # processes that met the poison
    dead: int = 0  # dead letters
    dead_is_poison: bool = False
    neighbours: Audit = _NOTHING  # of the poisonous message
    redriven: int = 0
    redriven_handled: int = 0
    bookings: Audit = _NOTHING  # handled by an ordered group, one of whose members is killed
    out_of_order: int = 0  # begun before an earlier one of their key was handled
    trades: Audit = _NOTHING  # handled by an ordered group while the route changes
    trades_out_of_order: int = 0
    changes: int = 0  # of the route
    longest_send_ms: float = 0.0  # meanwhile
    reminders: int = 0  # delayed messages that came
    reminders_sent: int = 0  # without the one that was cancelled
    early: int = 0  # came before they were due
    late_ms: tuple[float, float] = (0.0, 0.0)  # how late they came: typically, and the slowest of a hundred
    cancelled: bool = False
    pipeline: Pipeline | None = None  # None: it was not shown
    seconds: float = 0.0

    @property
    def lost(self) -> int:
        audits = (self.billing, self.search, self.neighbours, self.bookings, self.trades)
        return sum(audit.lost for audit in audits) + self.reminders_sent - self.reminders

    @property
    def well(self) -> bool:
        """Nothing lost, only the poison died and was handled in the end, all keys in order, nothing early."""
        complete = self.billing.handled == self.search.handled == self.sent > 0
        poison = self.dead_is_poison and self.redriven_handled == 1
        ordered = self.bookings.handled > 0 and self.out_of_order == 0
        elastic = self.trades.handled > 0 and self.changes > 0 and self.trades_out_of_order == 0
        on_time = self.reminders > 0 and self.early == 0 and self.cancelled
        queue = complete and self.lost == 0 and poison and ordered and elastic and on_time
        return queue and (self.pipeline is None or self._piped_well(self.pipeline))

    def _piped_well(self, pipeline: Pipeline) -> bool:
        return pipeline.well and pipeline.archived == self.sent

    @property
    def where(self) -> str:
        if self.shown.startswith("sqlite:"):
            return f"The queue is a file: {self.shown}. No server runs."
        return f"The queue is a database: {self.shown}. No other server runs."

    def fields(self) -> dict[str, Any]:
        return {
            "well": self.well,
            "url": self.shown,
            "sent": self.sent,
            "sent_per_s": round(self.sent_per_s),
            "lost": self.lost,
            "groups": {"billing": self.billing.fields(), "search": self.search.fields()},
            "poison": {
                "deaths": self.deaths,
                "dead_letters": self.dead,
                "dead_is_poison": self.dead_is_poison,
                "neighbours": self.neighbours.fields(),
                "redriven": self.redriven,
                "redriven_handled": self.redriven_handled,
            },
            "ordered": {**self.bookings.fields(), "out_of_order": self.out_of_order},
            "split": {
                **self.trades.fields(),
                "changes": self.changes,
                "out_of_order": self.trades_out_of_order,
                "longest_send_ms": round(self.longest_send_ms, 1),
            },
            "delayed": {
                "sent": self.reminders_sent,
                "arrived": self.reminders,
                "early": self.early,
                "late_p50_ms": round(self.late_ms[0], 1),
                "late_p99_ms": round(self.late_ms[1], 1),
                "cancelled": self.cancelled,
            },
            "pipeline": None if self.pipeline is None else self.pipeline.fields(),
            "seconds": round(self.seconds, 2),
        }
