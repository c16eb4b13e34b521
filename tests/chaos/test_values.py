"""What the value of a message says can be read back from it."""

from __future__ import annotations

from .values import Value, parse


def test_a_value_is_what_it_was() -> None:
    value = Value("p0.k3", 2, 17, "retry", 1_700_000_000_123)
    assert parse(str(value)) == value
