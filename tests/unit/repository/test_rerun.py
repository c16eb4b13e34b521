"""Which failures of a whole run get a second chance."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rerun import MOST, NEVER, main, refusal

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("room", NEVER)
def test_what_looks_for_lost_messages_is_never_forgiven(room: str) -> None:
    assert (ROOT / "tests" / room).is_dir()
    assert "never" in (refusal([f"tests/{room}/test_one.py::test_one"]) or "")


def test_a_few_others_are_run_again_and_many_are_not() -> None:
    some = [f"tests/unit/test_one.py::test_one[{n}]" for n in range(MOST + 1)]
    assert refusal(some[:MOST]) is None
    assert refusal(some) is not None
    assert "another reason" in (refusal([]) or "")


@pytest.mark.slow("starts pytest itself")
@pytest.mark.parametrize("steady", [True, False])
def test_it_must_pass_alone(tmp_path: Path, steady: bool, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "conftest.py").write_text("def pytest_addoption(parser): parser.addoption('--matrix')\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_one.py").write_text(
        "import os\ndef test_one(): assert os.environ.get('CROWDED') != 'yes'\ndef test_two(): pass\n"
        if steady
        else "def test_one(): assert False\ndef test_two(): pass\n"
    )
    crowded = os.environ | {"CROWDED": "yes"}
    subprocess.run([sys.executable, "-m", "pytest", "-q"], cwd=tmp_path, env=crowded, check=False)
    record = tmp_path / ".pytest_cache/v/cache/lastfailed"
    assert list(json.loads(record.read_text())) == ["test_one.py::test_one"]
    assert (main(tmp_path) == 0) is steady
    assert ("unsteady" in capfd.readouterr().out) is steady
