"""The demo's figures, all measured, and whether they are what the queue promises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .ledger import Audit

__all__ = ["Figures"]

_NOTHING = Audit(0, 0, 0, 0, 0)


@dataclass(slots=True)
class Figures:
    url: str
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
    seconds: float = 0.0

    @property
    def lost(self) -> int:
        return self.billing.lost + self.search.lost + self.neighbours.lost

    @property
    def well(self) -> bool:
        """Nothing lost, only the poison died, and it was handled in the end."""
        complete = self.billing.handled == self.search.handled == self.sent > 0
        return complete and self.lost == 0 and self.dead_is_poison and self.redriven_handled == 1

    def fields(self) -> dict[str, Any]:
        return {
            "well": self.well,
            "url": self.url,
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
            "seconds": round(self.seconds, 2),
        }
