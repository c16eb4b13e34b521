"""Reasons that every database can keep."""

from __future__ import annotations

import os

import pytest

from postroom.config import DEFAULTS
from postroom.model.delivery.reason import (
    NO_REASON,
    as_reason,
    plain_reason,
    split_reason,
    with_traceback,
)


@pytest.mark.parametrize("said", ["", "no", "Grüße aus 東京 🎉", "two\nlines\tand a tab", "100% 'quoted' \\"])
def test_text_stays_as_it_is(said: str) -> None:
    assert as_reason(said) == said


def test_what_no_database_keeps_is_replaced() -> None:
    assert as_reason("a\0b") == "a\ufffdb"
    assert as_reason(f"no file {os.fsdecode(bytes([0xFF]))}") == "no file ?"


def test_it_is_not_endless() -> None:
    limit = DEFAULTS.max_reason_chars
    assert as_reason("x" * limit) == "x" * limit
    assert as_reason("x" * (limit + 1)) == "x" * (limit - 1) + "…"
    assert as_reason("🎉" * 10**6, limit=3) == "🎉🎉…"


def test_a_reason_keeps_what_was_said_and_the_innermost_frames() -> None:
    frames = "".join(f'  File "shop.py", line {n}, in call\n' for n in range(1000)) + "ValueError: no\n"
    reason = with_traceback("ValueError: no", frames)
    said, trace = split_reason(reason)
    assert len(reason) <= DEFAULTS.max_reason_chars and as_reason(reason) == reason
    assert said == "ValueError: no"
    assert trace.startswith("Traceback (most recent call last):\n  …\n") and trace.endswith(
        "ValueError: no\n"
    )
    assert split_reason("two\n\nlines") == ("two\n\nlines", "")
    assert with_traceback("x" * DEFAULTS.max_reason_chars, frames) == "x" * DEFAULTS.max_reason_chars


def test_reasons_that_differ_in_numbers_and_ids_are_one_error() -> None:
    assert (
        plain_reason("order 17 (0x7f3a) at 2026-11-17T10:00:00Z is\nlost") == "order <n> (<id>) at <time> is"
    )
    assert plain_reason("  \n") == NO_REASON
    assert plain_reason("KeyError: 'sku'") != plain_reason("KeyError: 'name'")
