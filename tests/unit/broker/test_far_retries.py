"""Retries that leave through the schedule, and the attempts that go with them (I17, R20)."""

from __future__ import annotations

import pytest

from postroom.broker.moves.departures import attempts_used
from postroom.model.delivery.delivery import Delivery, Kind, Settlement, Stamp, Terms
from postroom.model.delivery.settlement import becomes
from postroom.model.messages.batch import BatchBuilder, Headers, Record, records

TERMS = Terms(lease_ms=1_000, max_attempts=3)
FAR, DEAD = Stamp(100, 7, due_at=5_000_000), Stamp(200, 8)


def retry(failures: int, *, used: int = 0, later: Stamp | None = FAR, dead: Stamp | None = DEAD) -> Delivery:
    held = Delivery(4, 4, 2_000, token=9, holder="ann", spent=failures + 1, failures=failures)
    after = becomes(held, Settlement(Kind.RETRY, 4, 4, 5_000_000, "why", dead, later, used), 1_000, TERMS)
    assert after is not None
    return after


@pytest.mark.parametrize(("failures", "used"), [(0, 0), (1, 0), (0, 1)])
def test_a_far_retry_is_stamped_for_its_moment(failures: int, used: int) -> None:
    after = retry(failures, used=used)
    assert after.stamp is not None
    assert (after.stamp.partition_id, after.stamp.due_at) == (FAR.partition_id, FAR.due_at)
    assert (after.spent, after.failures, after.reason) == (failures + 2, failures + 1, "why")
    assert after.visible_at == 1_000 + TERMS.mover_ms


@pytest.mark.parametrize(("failures", "used"), [(2, 0), (1, 1), (0, 2), (0, 9)])
def test_the_last_attempt_goes_to_the_dead_letters_at_once(failures: int, used: int) -> None:
    after = retry(failures, used=used)
    assert after.stamp is not None
    assert (after.stamp.partition_id, after.stamp.due_at) == (DEAD.partition_id, 0)


def test_what_was_used_counts_for_a_near_retry_too() -> None:
    near = retry(0, used=1, later=None)
    assert (near.stamp, near.visible_at, near.failures) == (None, 5_000_000, 1)
    assert retry(0, used=2, later=None).stamp is not None


def test_without_a_place_for_dead_letters_it_stays_as_it_is() -> None:
    after = retry(0, used=2, dead=None)
    assert (after.stamp, after.token, after.failures) == (None, 9, 0)


# ---- the headers ----


def message(*headers: tuple[str, bytes | None]) -> Record:
    builder = BatchBuilder()
    listed: Headers = list(headers)
    builder.append(0, None, b"", listed)
    return records(builder.build())[0]


@pytest.mark.parametrize(
    ("headers", "used"),
    [
        ((), (0, 0)),
        ((("postroom-attempts", b"5"), ("postroom-failures", b"3")), (5, 3)),
        ((("postroom-attempts", b"5"),), (0, 0)),  # a dead letter's: redriven, it begins anew
        ((("postroom-failures", b"3"),), (0, 3)),
        ((("postroom-attempts", b"x"), ("postroom-failures", b"3")), (0, 3)),
        ((("postroom-attempts", b"5"), ("postroom-failures", b"-3")), (0, 0)),
        ((("postroom-attempts", None), ("postroom-failures", b"")), (0, 0)),
    ],
)
def test_attempts_are_read_from_headers(
    headers: tuple[tuple[str, bytes | None], ...], used: tuple[int, int]
) -> None:
    assert attempts_used(message(*headers)) == used


@pytest.mark.parametrize("number", [b"9" * 5_000, b"-1", b"one", b"\xff", b""])
def test_numbers_that_a_sender_made_up_count_as_none(number: bytes) -> None:
    """`int` refuses the longest of them: settling must not fail for it."""
    builder = BatchBuilder()
    builder.append(1, None, b"", [("postroom-attempts", number), ("postroom-failures", number)])
    assert attempts_used(records(builder.build())[0]) == (0, 0)
