"""What of a poll's deliveries fits into its bytes."""

from __future__ import annotations

from postroom.broker.deliver.readable import fitted
from postroom.model.delivery.delivery import Delivery
from postroom.store.contract import StoredBatch

LOG = [StoredBatch(base, 10, 0, bytes(100)) for base in range(0, 100, 10)]


def read(partition_id: int, offset: int, max_messages: int, max_bytes: int) -> list[StoredBatch]:
    found = [b for b in LOG if b.last_offset >= offset and b.base_offset < offset + max_messages]
    return found[: max(1, max_bytes // 100)]


def spans(deliveries: object) -> list[tuple[int, int]]:
    return [(one.first, one.last) for one in deliveries]  # type: ignore[attr-defined]


def test_all_of_it_if_there_is_room() -> None:
    found = fitted(read, 1, [Delivery(3, 4, 0), Delivery(15, 44, 0)], LOG[4:5], 10_000)
    assert spans(found.deliveries) == [(3, 4), (15, 44)] and not found.left
    assert [batch.base_offset for batch in found.batches] == [0, 10, 20, 30, 40]


def test_a_delivery_is_cut_between_batches_and_the_rest_is_left() -> None:
    found = fitted(read, 1, [Delivery(3, 4, 0), Delivery(15, 44, 0), Delivery(60, 61, 0)], [], 300)
    assert spans(found.deliveries) == [(3, 4), (15, 29)]
    assert spans(found.left) == [(30, 44), (60, 61)]
    assert [batch.base_offset for batch in found.batches] == [0, 10, 20]


def test_the_first_batch_always_fits() -> None:
    found = fitted(read, 1, [Delivery(3, 14, 0)], [], 1)
    assert (spans(found.deliveries), spans(found.left)) == ([(3, 9)], [(10, 14)])


def test_a_batch_that_several_deliveries_share_counts_once() -> None:
    found = fitted(read, 1, [Delivery(n, n, 0) for n in range(10)], [], 100)
    assert len(found.deliveries) == 10 and len(found.batches) == 1


def test_what_retention_took_has_no_batch() -> None:
    found = fitted(lambda *_: [], 1, [Delivery(3, 4, 0)], [], 100)
    assert (spans(found.deliveries), found.batches, found.left) == ([(3, 4)], (), ())
