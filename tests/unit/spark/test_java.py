"""Which Java is taken, without starting one."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from postroom.errors import UsageError
from postroom.spark.session import find_java, java_major, settings, shim


def java(where: Path, version: str) -> Path:
    found = where / "bin" / "java"
    found.parent.mkdir(parents=True)
    found.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2025-01-01' >&2\n")
    found.chmod(0o755)
    return found


def none() -> None:
    return None


@pytest.mark.parametrize(
    ("version", "major"), [("17.0.15", 17), ("21", 21), ("1.8.0_402", 8), ("25.0.2", 25), ("x", None)]
)
def test_versions(tmp_path: Path, version: str, major: int | None) -> None:
    assert java_major(java(tmp_path, version)) == major


def test_nothing_there(tmp_path: Path) -> None:
    assert java_major(tmp_path / "bin" / "java") is None


def test_the_one_that_is_named_comes_first(tmp_path: Path) -> None:
    java(tmp_path / "named", "21.0.1")
    java(tmp_path / "found", "17.0.1")
    environ = {"JAVA_HOME": str(tmp_path / "named"), "PATH": str(tmp_path / "found" / "bin")}
    assert find_java(environ, bundled=none) == tmp_path / "named"
    assert find_java({"PATH": environ["PATH"]}, bundled=none) == tmp_path / "found"


def test_one_that_is_too_old_is_passed_over(tmp_path: Path) -> None:
    java(tmp_path / "old", "11.0.2")
    java(tmp_path / "new", "17.0.1")
    old = {"JAVA_HOME": str(tmp_path / "old")}
    assert find_java({**old, "PATH": str(tmp_path / "new" / "bin")}, bundled=none) == tmp_path / "new"
    with pytest.raises(UsageError, match=r"Java 17 or 21.*old/bin/java is version 11.*spark-local"):
        find_java({**old, "PATH": ""}, bundled=none)


def test_no_java_at_all() -> None:
    with pytest.raises(UsageError, match=r"there is none: install one .* or run `pip install '\.\[spark"):
        find_java({"PATH": ""}, bundled=none)


def test_the_launcher_leaves_out_one_argument_and_nothing_else(tmp_path: Path) -> None:
    real = tmp_path / "real java"
    real.write_text('#!/bin/sh\nfor a in "$@"; do echo "[$a]"; done\n')
    real.chmod(0o755)
    home = find_java({"PATH": ""}, bundled=lambda: real)
    told = ["-cp", "a b:c", "--add-modules=jdk.incubator.vector", "-D$x='y'", "", "Main"]
    asked = subprocess.run([str(home / "bin" / "java"), *told], capture_output=True, text=True, check=True)
    assert asked.stdout.splitlines() == ["[-cp]", "[a b:c]", "[-D$x='y']", "[]", "[Main]"]
    assert shim(real) != home


def test_settings() -> None:
    local = settings("local[2]", config={"spark.ui.enabled": True, "spark.x": 3})
    assert (local["spark.ui.enabled"], local["spark.x"]) == ("true", "3")
    manager = "spark.sql.streaming.checkpointFileManagerClass"
    assert manager in local and manager not in settings("spark://h:7077")
