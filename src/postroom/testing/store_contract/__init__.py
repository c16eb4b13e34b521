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
    "access",
    "appending",
    "cancelling",
    "concurrency",
    "duties",
    "gate",
    "groups",
    "delayed_ids",
    "harness",
    "ids",
    "lanes",
    "marks",
    "measures",
    "moving",
    "ordered",
    "ordered_settling",
    "polling",
    "rates",
    "reading",
    "retention",
    "routes",
    "schedule",
    "seal",
    "sealing",
    "serving",
    "settling",
    "staging",
    "staging_published",
    "topics",
    "usage",
    "walk",
    "watching",
)
for _part in _PARTS:  # before they are imported, so that a failing assert says why
    pytest.register_assert_rewrite(f"{__name__}.{_part}")

from .access import AccessContract  # noqa: E402
from .appending import AppendContract  # noqa: E402
from .cancelling import CancelContract  # noqa: E402
from .concurrency import ConcurrencyContract  # noqa: E402
from .delayed_ids import DelayedIdContract  # noqa: E402
from .duties import DutyContract  # noqa: E402
from .gate import GateContract  # noqa: E402
from .groups import GroupContract  # noqa: E402
from .harness import MovableClock, StoreHarness  # noqa: E402
from .ids import IdContract  # noqa: E402
from .lanes import LaneContract  # noqa: E402
from .marks import MarkContract  # noqa: E402
from .measures import MeasureContract  # noqa: E402
from .moving import MoveContract  # noqa: E402
from .ordered import OrderedContract  # noqa: E402
from .ordered_settling import OrderedSettleContract  # noqa: E402
from .parking import ParkingContract  # noqa: E402
from .polling import PollContract  # noqa: E402
from .rates import RateContract  # noqa: E402
from .reading import ReadContract  # noqa: E402
from .retention import RetentionContract  # noqa: E402
from .routes import RouteContract, TurnBackContract  # noqa: E402
from .schedule import ScheduleContract  # noqa: E402
from .seal import SealContract  # noqa: E402
from .sealing import SealedMoveContract  # noqa: E402
from .serving import BrokerContract  # noqa: E402
from .settling import SettleContract  # noqa: E402
from .staging import StagingContract  # noqa: E402
from .staging_published import PublishContract  # noqa: E402
from .topics import TopicContract  # noqa: E402
from .usage import UsageContract  # noqa: E402
from .walk import WalkContract  # noqa: E402
from .watching import WatchContract  # noqa: E402

__all__ = ["MovableClock", "StoreContract", "StoreHarness"]


class StoreContract(
    AppendContract,
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
    MoveContract,
    SealedMoveContract,
    StagingContract,
    PublishContract,
    SealContract,
    RouteContract,
    TurnBackContract,
    GateContract,
    IdContract,
    DelayedIdContract,
    DutyContract,
    BrokerContract,
    RateContract,
    LaneContract,
    AccessContract,
    WatchContract,
):
    """All of it."""
