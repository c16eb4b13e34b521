"""The page about serving agrees with the settings there are."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields
from typing import Any

from postroom.config import DEFAULTS
from postroom.serve_settings import ServeSettings, key_of
from postroom.units import format_bytes, format_duration
from tests.docs.pages import ROOT, table

PAGE = ROOT / "docs" / "howto" / "serving.md"


def test_the_table_of_settings_is_the_code() -> None:
    shown = {row[0].strip("`"): row[1].strip("`") for row in table(PAGE, "Settings")}
    assert shown == {key_of(one.name): _default(one) for one in fields(ServeSettings)}


def _default(one: Field[Any]) -> str:
    if one.default is MISSING or one.default == "":
        return "–"
    if one.metadata["kind"] == "flag":
        return str(one.default).lower()
    if one.name.endswith("_ms"):
        return format_duration(one.default)
    return format_bytes(one.default) if one.name.endswith("_bytes") else str(one.default)


def test_how_long_a_token_lives_on_is_stated() -> None:
    text = (ROOT / "docs" / "howto" / "security.md").read_text(encoding="utf-8")
    assert f"again every {DEFAULTS.access_fresh_ms // 1000} seconds" in text
    assert f"within {format_duration(DEFAULTS.access_fresh_ms)}" in text
