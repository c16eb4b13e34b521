"""What docs/security.md says is shown by tests that are there, and nobody is left out of it."""

from __future__ import annotations

import re

from postroom.model.access import ACTIONS

from .pages import ROOT

PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")


def test_every_test_that_is_named_is_there() -> None:
    named = set(re.findall(r"`(tests/[\w/]+\.py)`", PAGE))
    assert len(named) > 20
    assert [path for path in sorted(named) if not (ROOT / path).is_file()] == []


def test_every_line_of_what_somebody_cannot_do_names_a_test() -> None:
    tables = PAGE.split("## What each cannot do to others")[1].split("## What is yours to do")[0]
    lines = [line for line in tables.splitlines() if line.startswith("| ") and "shown by" not in line]
    assert lines
    assert [line for line in lines if "`tests/" not in line] == []


def test_the_rights_are_those_there_are() -> None:
    """`manage` has no line of its own: whoever has it on a topic may do everything to that topic."""
    rights = set(re.findall(r"^\| `(\w+)`", PAGE, flags=re.M))
    assert rights == set(ACTIONS) - {"manage"}
