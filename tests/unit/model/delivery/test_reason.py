"""Reasons that every database can keep."""

from __future__ import annotations

import os

import pytest

from postroom.config import DEFAULTS
from postroom.model.delivery.reason import as_reason


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
