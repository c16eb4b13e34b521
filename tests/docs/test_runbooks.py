"""Every alert has its runbook, which it links; the console has the same, and links it where it belongs."""

from __future__ import annotations

import re

from tests.docs.pages import ROOT
from tools.docs.runbooks import SCRIPT, sections, text

RULES = (ROOT / "docs" / "examples" / "prometheus-rules.yml").read_text(encoding="utf-8")
ALERTS = re.findall(r"^ +- alert: (\w+)$", RULES, re.MULTILINE)
STATIC = ROOT / "src" / "postroom" / "console" / "static"


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    assert list(sections()) == ALERTS


def test_every_alert_links_its_own_runbook() -> None:
    assert re.findall(r"^ +runbook: docs/howto/runbooks\.md#(\w+)$", RULES, re.MULTILINE) == [
        alert.lower() for alert in ALERTS
    ]


def test_a_runbook_says_what_is_wrong_and_then_what_to_do() -> None:
    for alert, lines in sections().items():
        assert len(lines) >= 2 and all(lines), alert


def test_the_console_has_the_same_text() -> None:
    assert SCRIPT.read_text(encoding="utf-8") == text(), "python -m tools.docs.runbooks"


def test_what_needs_attention_links_runbooks_that_there_are() -> None:
    overview = (STATIC / "overview.js").read_text(encoding="utf-8")
    (linked,) = re.findall(r"^const RUNBOOK = \{(.*)\};$", overview, re.MULTILINE)
    (said,) = re.findall(r"^const SAID = \{(.*?)^\};$", overview, re.MULTILINE | re.DOTALL)
    found = dict(re.findall(r"(\w+): \"(\w+)\"", linked))
    assert set(found) == set(re.findall(r"^  (\w+):", said, re.MULTILINE))
    assert set(found.values()) <= set(ALERTS)
