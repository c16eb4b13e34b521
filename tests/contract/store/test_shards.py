"""The store contract on a queue of two databases, with every partition on the second (R6)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path
from unittest import mock

import pytest

from postroom.address import parse
from postroom.errors import StoreUnavailable
from postroom.model.policy.settings import TopicSettings
from postroom.store import SqlStore, open_store
from postroom.store.contract import Store, Watcher
from postroom.store.sharded.shard import Shard
from postroom.store.sharded.store import ShardedCatalog, ShardedStore
from postroom.testing.store_contract import MovableClock, StoreContract
from postroom.testing.store_contract.harness import _failing_commits
from tests.contract.stores import routing

NAME = "b"


class OnSecond:
    """A queue on two databases, seen from the second one, where its partitions are."""

    def __init__(self, first: str, other: str, clock: MovableClock) -> None:
        whole = open_store(parse(first), clock, shards={NAME: parse(other)})
        assert isinstance(whole, ShardedStore)
        self._whole = whole
        part = whole.parts()[NAME]
        self.log, self.catalog, self.routes = whole.log, part.catalog, part.routes
        self.progress, self.usage = part.progress, part.usage
        self.schedule, self.duties, self.now_ms = part.schedule, part.duties, part.now_ms

    @property
    def second(self) -> SqlStore:
        opened = self._whole._shards[NAME]._opened
        assert opened is not None
        return opened

    def watch(self) -> Watcher:
        return self._whole.watch()

    def close(self) -> None:
        self._whole.close()

    def __getattr__(self, name: str) -> object:
        return getattr(self._whole, name)


@routing
class TestSecondShard(StoreContract):
    @pytest.fixture(autouse=True)
    def _all_on_the_second(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ShardedCatalog, "_taking", lambda self, tx: [NAME])

    @pytest.fixture(autouse=True)
    def _databases(self, tmp_path: Path) -> None:
        self.urls = (f"sqlite:///{tmp_path}/first.db", f"sqlite:///{tmp_path}/second.db")

    def open_store(self, tmp_path: Path, clock: MovableClock) -> Store:
        return OnSecond(*self.urls, clock)  # type: ignore[return-value]

    def reopen(self, tmp_path: Path, clock: MovableClock) -> Store:
        return OnSecond(*self.urls, clock)  # type: ignore[return-value]

    def _unseal(self, store: Store, partition_id: int) -> None:
        super()._unseal(second(store), partition_id)

    def restarted(self, store: Store, at_ms: int) -> AbstractContextManager[object]:
        return super().restarted(second(store), at_ms)

    def flushed(self, store: Store, verb: Callable[[], object]) -> bool:
        return super().flushed(second(store), verb)

    def durably_announced(self, store: Store, verb: Callable[[], object]) -> bool:
        with mock.patch.object(second(store).session.dialect, "announce") as announce:
            return self.flushed(store, verb) and bool(announce.called)

    def failing_commits(
        self, store: Store, meanwhile: Callable[[], object] = bool
    ) -> AbstractContextManager[None]:
        assert isinstance(store, OnSecond)
        return _failing(store._whole._shards.values(), meanwhile)


if os.environ.get("POSTROOM_TEST_STORES") == "all":  # takes some minutes

    class TestSecondShardOnServers(TestSecondShard):
        """Of different kinds, either of which is the second."""

        @pytest.fixture(autouse=True, params=["mysql", "postgres"])
        def _databases(self, request: pytest.FixtureRequest, postgres_ready: str, mysql_ready: str) -> None:
            urls = (postgres_ready, mysql_ready)
            self.urls = urls if request.param == "mysql" else urls[::-1]


def second(store: Store) -> SqlStore:
    assert isinstance(store, OnSecond)
    return store.second


@contextmanager
def _failing(shards: Iterable[Shard], meanwhile: Callable[[], object]) -> Iterator[None]:
    """None of them is taken for away by that: nobody is to wait in these tests."""
    with ExitStack() as stack:
        for shard in shards:
            assert shard._opened is not None
            stack.enter_context(_failing_commits(shard._opened, meanwhile))
            stack.enter_context(mock.patch.object(shard, "_lost"))
        yield


def test_while_no_shard_answers_in_time_a_topic_is_refused_for_the_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is given up on while it works on the request, and the second is away."""
    first, other = (parse(f"sqlite:///{tmp_path}/{name}.db") for name in ("first", "second"))
    with closing(open_store(first, MovableClock(), shards={NAME: other})) as store:
        monkeypatch.setattr(ShardedCatalog, "_taking", lambda self, tx: [])
        with pytest.raises(StoreUnavailable, match="no shard takes new partitions now"):
            store.catalog.create_topic("orders", TopicSettings(), 2)
