"""Programs of users type-check strictly, with asyncio and without: wrong lines are refused, and no others."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tools.sync_stub import STUB, Stub

SAMPLES = Path(__file__).with_name("samples")


def marked() -> set[tuple[str, int]]:
    """File and line of what is to be refused."""
    return {
        (path.name, number)
        for path in SAMPLES.glob("*.py")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if line.endswith("# refused")
    }


def test_the_stub_of_the_blocking_client_is_current() -> None:
    assert STUB.read_text(encoding="utf-8") == Stub().text(), "run `make stub`"


@pytest.mark.slow("mypy reads the whole client")
def test_mypy_refuses_what_is_marked_and_nothing_else() -> None:
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", str(SAMPLES)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=110, cwd=SAMPLES.parents[2]).stdout
    found = {(Path(file).name, int(line)) for file, line in re.findall(r"^(.+?):(\d+): error", told, re.M)}
    assert found == marked(), told


@pytest.mark.slow("pyright reads the whole client")
def test_pyright_refuses_what_is_marked_and_nothing_else(tmp_path: Path) -> None:
    if find_spec("pyright") is None or shutil.which("node") is None:
        pytest.skip("pyright needs its package and node: pip install pyright, and Node.js")
    shutil.copytree(SAMPLES, tmp_path / "samples")
    settings = {"include": ["samples"], "typeCheckingMode": "strict", "pythonVersion": "3.11"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "-p", str(tmp_path), "--pythonpath", sys.executable]
    command.append("--outputjson")
    told = subprocess.run(command, capture_output=True, text=True, timeout=110, cwd=tmp_path).stdout
    problems = [one for one in json.loads(told)["generalDiagnostics"] if one["severity"] == "error"]
    found = {(Path(one["file"]).name, one["range"]["start"]["line"] + 1) for one in problems}
    assert found == marked(), told
