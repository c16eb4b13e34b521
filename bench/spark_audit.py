"""The audit on millions of messages: whether it finds every fault that was planted, and nothing else."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import postroom.sync
from postroom.spark.jobs.audit import audit
from tests.integration.spark.planting import fill, options, plant, reported

from .spark_ground import Place

__all__ = ["Audit", "run"]

_KEYS, _EACH = 1000, 100


@dataclass(frozen=True)
class Audit:
    messages: int
    planted: int  # lines that the report should have
    found: int
    missed: int
    invented: int
    seconds: float

    @property
    def good(self) -> bool:
        return self.found == self.planted and not self.missed and not self.invented


def run(here: Place, messages: int) -> Audit:
    """About so many messages: 1,000 keys that count, and 100 faults of each kind among them."""
    folder = Path(here.fresh())
    folder.mkdir()
    url = f"sqlite:///{folder}/queue.db"
    planted = plant(_KEYS, max(20, messages // _KEYS), each=_EACH, seed=time.time_ns())
    with postroom.sync.connect(url) as mq:
        mq.create_topic("orders", partitions=4)
        count = fill(mq, "orders", planted, folder)
    done = audit(here.spark, options(url, "orders", folder))
    assert done.messages == count and not done.unchecked, done
    wanted, found = planted.found(), reported(folder)
    return Audit(count, len(wanted), len(found), len(wanted - found), len(found - wanted), done.seconds)
