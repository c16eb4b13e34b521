"""Which trades were sent and which were handled, in that order, as the job `audit` reads it.

Written from the same receipts and ledgers that the demo counts from, so that two audits that know nothing of
each other look at the same. Must never ask the queue: then it would be the witness of its own case.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from .ledger import Place, in_order

__all__ = ["HANDLED", "SENT", "write_journals"]

SENT, HANDLED = "trades-sent.csv", "trades-handled.csv"


def write_journals(folder: Path, sent: Iterable[Place], ledgers: Iterable[Path]) -> None:
    """`sent` has the messages of a key in the order in which they were sent."""
    for name, places in ((SENT, sent), (HANDLED, in_order(ledgers))):
        lines = (f"{partition}:{offset},{at}\n" for at, (partition, offset) in enumerate(places))
        (folder / name).write_text("".join(("place,at\n", *lines)))
