"""Where a partition goes if nobody says: to another shard, and what is said if there is none just now."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from postroom import InvalidSetting, StoreUnavailable
from postroom.broker.topology.route_changes import RouteChanges
from postroom.store.contract import ShardState


def shard(name: str, state: str = "open", *, away: bool = False) -> ShardState:
    return ShardState(name, "sqlite", state, away, 1, 0, 0)


def emptiest(*states: ShardState) -> str:
    store: Any = SimpleNamespace(shards=lambda: list(states), brokers=SimpleNamespace(announced=list))
    changes = RouteChanges(store, cast(Any, None))
    return changes._emptiest(cast(Any, SimpleNamespace(ranges=())), here="")


def test_a_shard_that_is_away_is_said_to_be_away_and_what_to_do() -> None:
    with pytest.raises(StoreUnavailable) as refused:
        emptiest(shard(""), shard("b", away=True), shard("c", "draining"))
    assert "shard 'b' is away" in str(refused.value) and "move it once" in str(refused.value)
    assert refused.value.details["shard"] == "b" and refused.value.retriable
    assert "operator" in refused.value.details["_served"]


@pytest.mark.parametrize("others", [(), (shard("c", "draining"),), (shard("c", "draining", away=True),)])
def test_where_no_other_shard_takes_partitions_it_is_said_how_to_have_one(
    others: tuple[ShardState, ...],
) -> None:
    with pytest.raises(InvalidSetting, match="there is no other shard that takes partitions"):
        emptiest(shard(""), *others)


def test_one_that_answers_is_taken_though_others_are_away() -> None:
    assert emptiest(shard(""), shard("b", away=True), shard("c")) == "c"
