"""`postroom doctor` sees that the machine's clock was set (I26)."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from postroom.cli.checks import Finding
from postroom.cli.checks.sqlite import examine_file
from postroom.clock import SteadyClock, wall_ms
from postroom.model.policy.settings import TopicSettings
from postroom.store import open_sqlite
from postroom.store.contract import Append
from postroom.testing.store_contract.harness import batch

HOUR_MS = 3_600_000


def found(path: Path, name: str) -> list[Finding]:
    return [one for one in examine_file(path, lambda *_: None) if one.check == name]


def test_a_clock_that_nobody_set_is_fine(tmp_path: Path) -> None:
    open_sqlite(tmp_path / "queue.db").close()
    assert [(one.state, one.message) for one in found(tmp_path / "queue.db", "clock")] == [
        ("ok", "the queue's time is this machine's")
    ]


@pytest.mark.parametrize(("set_by_ms", "said"), [(-HOUR_MS, "behind"), (HOUR_MS, "ahead of")])
def test_a_clock_that_was_set_is_shown(tmp_path: Path, set_by_ms: int, said: str) -> None:
    """The queue was made an hour from now, and nobody has it open."""
    path = tmp_path / "queue.db"
    with closing(open_sqlite(path, SteadyClock(lambda: wall_ms() + set_by_ms))) as store:
        topic = store.catalog.create_topic("orders", TopicSettings(), 1)
        store.log.append([Append(topic.route.ranges[0].partition_id, batch())])
    (clock,) = found(path, "clock")
    assert clock.state == "warn" and said in clock.message and "3,6" in clock.message
    assert "followed slowly" in clock.advice


def test_messages_of_the_future_are_shown(tmp_path: Path) -> None:
    path = tmp_path / "queue.db"
    with closing(open_sqlite(path, SteadyClock(lambda: wall_ms() + 1000 * HOUR_MS))) as store:
        topic = store.catalog.create_topic("orders", TopicSettings(), 1)
        store.log.append([Append(topic.route.ranges[0].partition_id, batch())])
    open_sqlite(path).close()  # the clock is right again
    assert [one.state for one in found(path, "clock")] == ["ok"]
    (stored,) = found(path, "stored times")
    assert "in the future" in stored.message
