"""Whether an append that failed can have stored anything: only a commit on its way can (I2, I3)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from postroom import StoreUnavailable
from postroom.model.messages.batch import BatchBuilder
from postroom.model.policy.settings import TopicSettings
from postroom.store import SqlStore, open_sqlite
from postroom.store.contract import Append


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqlStore]:
    made = open_sqlite(tmp_path / "queue.db")
    assert isinstance(made, SqlStore)
    yield made
    made.close()


@pytest.fixture
def append(store: SqlStore) -> Append:
    topic = store.catalog.create_topic("orders", TopicSettings(), 1)
    builder = BatchBuilder("none", 1000)
    builder.append(1, None, b"x", [])
    store.log.append([Append(topic.route.ranges[0].partition_id, builder.build(7, 0, 0))])
    return Append(topic.route.ranges[0].partition_id, builder.build(7, 0, 1))


def _failing(*args: Any, **named: Any) -> Any:
    raise StoreUnavailable("gone")


def test_before_the_commit_nothing_was_stored(
    store: SqlStore, append: Append, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store.session.dialect, "begin", _failing)
    with pytest.raises(StoreUnavailable) as caught:
        store.log.append([append])
    assert caught.value.details["stored"] is False


def test_a_commit_that_is_not_answered_is_of_unknown_fate(
    store: SqlStore, append: Append, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = store.session.dialect.end

    def committed(connection: Any, lane: Any, *, commit: bool) -> None:
        end(connection, lane, commit=commit)
        if commit:
            raise StoreUnavailable("gone")

    monkeypatch.setattr(store.session.dialect, "end", committed)
    with pytest.raises(StoreUnavailable) as caught:
        store.log.append([append])
    assert "stored" not in caught.value.details
