"""Which failures of a whole run get a second chance."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rerun import IMPATIENT, MOST, STRICT, main, refusal

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("room", STRICT)
def test_what_looks_for_lost_messages_is_forgiven_if_it_did_not_come_to_look(room: str) -> None:
    assert (ROOT / "tests" / room).is_dir()
    test = f"tests/{room}/test_one.py::test_one"
    for why in ("AssertionError: 1 lost", "Failed: Timeout >120.0s", ""):
        assert "never" in (refusal({test: why}) or "")
    assert refusal({test: f"{IMPATIENT}work goes on: not within 60 s"}) is None


def test_a_few_others_are_run_again_and_many_are_not() -> None:
    some = {f"tests/unit/test_one.py::test_one[{n}]": "AssertionError" for n in range(MOST + 1)}
    assert refusal(some) is not None
    some.popitem()
    assert refusal(some) is None
    assert "another reason" in (refusal({}) or "")


@pytest.mark.slow("starts pytest itself")
@pytest.mark.parametrize("steady", [True, False])
def test_it_must_pass_alone(
    tmp_path: Path, steady: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "conftest.py").write_text(
        "pytest_plugins = ['tests.rerun']\ndef pytest_addoption(parser): parser.addoption('--matrix')\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_one.py").write_text(
        "import os\ndef test_one():\n    if os.environ.get('CROWDED') == 'yes': raise TimeoutError('slow')\n"
        "def test_two(): pass\n"
        if steady
        else "def test_one(): assert False\ndef test_two(): pass\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    crowded = os.environ | {"CROWDED": "yes"}
    subprocess.run([sys.executable, "-m", "pytest", "-q"], cwd=tmp_path, env=crowded, check=False)
    record = tmp_path / ".pytest_cache/v/cache/lastfailed"
    assert list(json.loads(record.read_text())) == ["test_one.py::test_one"]
    assert (main(tmp_path) == 0) is steady
    said = capfd.readouterr().out
    assert ("unsteady" in said) is steady
    assert ("test_one: TimeoutError: slow" if steady else "test_one: assert False") in said
