"""HTTP is an extra: without its packages there is a sentence, and everything else works."""

from __future__ import annotations

import subprocess
import sys

import pytest

_WITHOUT = """
import sys
sys.modules[{package!r}] = None
from postroom.errors import UsageError
try:
    import postroom.http.{module}
except UsageError as error:
    print(error)
import postroom.broker.served, postroom.cli
"""


@pytest.mark.parametrize(("package", "module"), [("fastapi", "app"), ("uvicorn", "server")])
def test_a_missing_package_is_named_with_the_way_to_get_it(package: str, module: str) -> None:
    code = _WITHOUT.format(package=package, module=module)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert package in ran.stdout and "pip install '.[server]'" in ran.stdout
