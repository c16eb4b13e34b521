"""Whose producer is it? (I23)"""

from __future__ import annotations

from postroom.model.access import KEY_BYTES, producer_of

KEY, OTHER = bytes(KEY_BYTES), bytes(range(KEY_BYTES))


def test_one_principal_and_id_are_one_producer() -> None:
    assert producer_of(KEY, "shop", 7) == producer_of(KEY, "shop", 7)


def test_others_are_others() -> None:
    told = [(KEY, "shop", 7), (KEY, "shop", 8), (KEY, "evil", 7), (OTHER, "shop", 7), (KEY, "", 7)]
    found = {producer_of(*one) for one in told}
    assert len(found) == len(told)
    assert 7 not in found


def test_it_is_an_id_as_any_other() -> None:
    """63 bits, and all of them used: it must be as hard to meet as a random one."""
    ids = (0, 1, 2**31, 2**62, 2**63 - 1)
    found = [producer_of(KEY, name, one) for one in ids for name in ("a", "shop", "é" * 120)]
    assert all(0 <= one < 2**63 for one in found)
    assert max(found) >= 2**61 and len(set(found)) == len(found)
