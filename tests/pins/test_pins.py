"""What users rely on is as it was pinned; and each pin notices when it is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import PAGES, ROOT

from . import golden, internals
from .citations import SOURCE, citations, fallen
from .pins import PINS, SERVER_PINS, Pin, ServerPin
from .public_names import PUBLIC, documented_imports, pinned_names
from .snapshots import differences, path_of, read, renew_command

FRAMES: dict[str, Any] = json.loads(read("frames.json") or "{}")
SHOWN = [
    *PAGES,
    *(path for folder in ("docs", "examples", "deploy") for path in (ROOT / folder).rglob("*.py")),
]
WHOLE = [pin for pin in PINS if pin.file != "citations.json"]  # which may grow


@pytest.mark.parametrize("pin", WHOLE, ids=lambda pin: pin.file.partition(".")[0])
def test_it_is_as_it_was_pinned(pin: Pin) -> None:
    problem = differences(pin.file, pin.made(), pin.means)
    if problem:
        pytest.fail(problem, pytrace=False)


@pytest.mark.parametrize("pin", SERVER_PINS, ids=lambda pin: pin.file.partition(".")[0])
def test_tables_on_servers_are_as_they_were_pinned(pin: ServerPin, request: pytest.FixtureRequest) -> None:
    problem = differences(pin.file, pin.made(request.getfixturevalue(pin.fixture)), pin.means)
    if problem:
        pytest.fail(problem, pytrace=False)


def test_every_snapshot_belongs_to_a_pin() -> None:
    files = {path.name for path in path_of("").iterdir()}
    assert files == {pin.file for pin in (*PINS, *SERVER_PINS)}


# ---- public names ----


@pytest.mark.parametrize("page", SHOWN, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_pages_and_examples_import_is_pinned(page: Path) -> None:
    for module, name in documented_imports(page.read_text(encoding="utf-8")):
        if f"{module}.{name}" in PUBLIC or (not name and module in PUBLIC):
            continue
        assert module in PUBLIC, f"{page.name} imports from {module}: pin it in public_names.PUBLIC"
        assert name in pinned_names(module), f"{page.name} imports {name} of {module}: pin it too"


# ---- golden frames: what the pinned bytes mean ----


@pytest.mark.parametrize("operation", [*internals.operations()], ids=lambda one: one.name)
def test_pinned_requests_and_replies_are_understood(operation: internals.Operation) -> None:
    pinned = FRAMES["operations"].get(operation.name)
    assert pinned, f"{operation.name} has no golden frame: {renew_command('frames.json')}"
    assert operation.request_of(_frame(pinned["request"])) == golden.request_of(operation)
    assert operation.reply_of(_frame(pinned["reply"])) == golden.filled(operation.reply_type)
    short = golden.shortest(operation)
    if short is not None:
        request, _ = operation.request_of(_frame(pinned["shortest request"]))
        assert [getattr(request, name) for name in request.__struct_fields__[: len(short)]] == short


@pytest.mark.parametrize("other", internals.other_frames(), ids=lambda one: one.name)
def test_pinned_handshakes_and_pushes_are_understood(other: internals.Other) -> None:
    assert other.header_of(_frame(FRAMES["others"][other.name])) == golden.filled(other.header_type)


@pytest.mark.parametrize("error", [*golden.failures()], ids=lambda one: type(one).__name__)
def test_pinned_errors_arrive_as_the_same_class(error: Any) -> None:
    found: Any = internals.decoded_failure(_frame(FRAMES["errors"][type(error).__name__]))
    assert (type(found), str(found), found.details) == (type(error), str(error), error.details)


def _frame(shown: dict[str, Any]) -> bytes:
    return bytes.fromhex(shown["frame"])


# ---- citations ----


def test_no_citation_of_an_invariant_or_a_requirement_was_lost() -> None:
    lost = fallen(json.loads(read("citations.json")), citations(SOURCE))
    if lost:
        told = [
            "Citations were lost. Each tells which promise a line keeps: put it back at the line that keeps "
            "it now. If that line is gone for good:",
            f"    {renew_command('citations.json')}",
            *lost,
        ]
        pytest.fail("\n".join(told), pytrace=False)


# ---- the pins notice ----


def test_a_difference_is_shown_with_what_it_means_and_how_to_renew_it() -> None:
    changed = read("metrics.txt").replace("postroom_brokers gauge", "postroom_peers gauge")
    told = differences("metrics.txt", changed, "Dashboards ask for these.")
    assert "Dashboards ask for these." in told and "python -m tests.pins renew metrics" in told
    assert "-postroom_brokers gauge {}" in told and "+postroom_peers gauge {}" in told
    assert differences("metrics.txt", read("metrics.txt"), "") == ""


def test_a_citation_that_is_lost_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1  # I3, and R12 (I3)\n", encoding="utf-8")
    before = citations(tmp_path)
    assert before == {"I3": 2, "R12": 1}
    (tmp_path / "a.py").write_text("x = 1  # I3\n", encoding="utf-8")
    assert fallen(before, citations(tmp_path)) == ["I3: cited 2 times, now 1", "R12: cited 1 times, now 0"]
    assert fallen({"I3": 1}, {"I3": 5, "I9": 1}) == []


def test_a_page_that_imports_what_is_not_pinned_is_noticed() -> None:
    found = list(documented_imports("from postroom.a import (\n    B,\n    C,\n)\nimport postroom.d\n"))
    assert found == [("postroom.a", "B"), ("postroom.a", "C"), ("postroom.d", "")]
