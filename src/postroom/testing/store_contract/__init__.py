"""The conformance suite of the store contract. A store that passes it can carry Postroom (R7).

    from postroom.testing.store_contract import StoreContract

    class TestMyStore(StoreContract):
        def open_store(self, tmp_path, clock):
            return MyStore(tmp_path / "store", clock)        # new and empty, on that clock

        def reopen(self, tmp_path, clock):
            return MyStore(tmp_path / "store", clock)        # the same data, as another process sees it

Each verb of `postroom.store.contract` and each promise in its docstrings has a test here; the names of the
tests are the promises. `harness` says what else a store that is not built on `SqlStore` has to provide.
"""

from __future__ import annotations

import pytest

_PARTS = (
    "catalog",
    "concurrency",
    "duties",
    "harness",
    "kafka_groups",
    "listing",
    "log.appending",
    "log.ids",
    "log.reading",
    "moving",
    "progress.gate",
    "progress.measures",
    "progress.ordered",
    "progress.ordered_settling",
    "progress.polling",
    "progress.settling",
    "routes",
    "schedule",
    "served",
    "staging",
    "staging_published",
)
for _part in _PARTS:  # before they are imported, so that a failing assert says why
    pytest.register_assert_rewrite(f"{__name__}.{_part}")

from .catalog import (  # noqa: E402
    GroupContract,
    TopicContract,
)
from .concurrency import (  # noqa: E402
    ConcurrencyContract,
    WatchContract,
)
from .duties import (  # noqa: E402
    DutyContract,
    UsageContract,
)
from .harness import MovableClock, StoreHarness  # noqa: E402
from .kafka_groups import KafkaGroupContract  # noqa: E402
from .listing import ListingContract  # noqa: E402
from .log.appending import (  # noqa: E402
    AppendContract,
    LoneAppendContract,
    SealContract,
)
from .log.ids import (  # noqa: E402
    DelayedIdContract,
    IdContract,
)
from .log.reading import (  # noqa: E402
    MarkContract,
    ReadContract,
    RetentionContract,
)
from .moving import (  # noqa: E402
    MoveContract,
    SealedMoveContract,
)
from .progress.gate import GateContract  # noqa: E402
from .progress.measures import (  # noqa: E402
    MeasureContract,
    WalkContract,
)
from .progress.ordered import OrderedContract  # noqa: E402
from .progress.ordered_settling import (  # noqa: E402
    OrderedSettleContract,
    ParkingContract,
)
from .progress.polling import PollContract  # noqa: E402
from .progress.settling import SettleContract  # noqa: E402
from .routes import KafkaRouteContract, RouteContract, TurnBackContract  # noqa: E402
from .schedule import (  # noqa: E402
    CancelContract,
    ScheduleContract,
)
from .served import (  # noqa: E402
    AccessContract,
    AuditContract,
    BrokerContract,
    LaneContract,
    RateContract,
)
from .staging import StagingContract  # noqa: E402
from .staging_published import PublishContract  # noqa: E402

__all__ = ["MovableClock", "StoreContract", "StoreHarness"]


class StoreContract(
    AppendContract,
    LoneAppendContract,
    ReadContract,
    MarkContract,
    RetentionContract,
    ConcurrencyContract,
    TopicContract,
    GroupContract,
    PollContract,
    OrderedContract,
    OrderedSettleContract,
    ParkingContract,
    SettleContract,
    MeasureContract,
    WalkContract,
    UsageContract,
    ScheduleContract,
    CancelContract,
    ListingContract,
    MoveContract,
    SealedMoveContract,
    StagingContract,
    PublishContract,
    SealContract,
    RouteContract,
    TurnBackContract,
    KafkaRouteContract,
    KafkaGroupContract,
    GateContract,
    IdContract,
    DelayedIdContract,
    DutyContract,
    BrokerContract,
    RateContract,
    LaneContract,
    AuditContract,
    AccessContract,
    WatchContract,
):
    """A store keeps the contract if it passes all of this."""
