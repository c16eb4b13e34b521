"""Makes an environment for each version of PySpark, tries everything in it, and prints a table.

    python -m tests.spark_versions [--where FOLDER] [4.0 4.3 …]

An environment takes about 1 GB and a minute or two, and is kept: the next time it is there. Not a part of
`make test-spark`, which runs on the version in constraints.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from tests.spark_versions.checks import CHECKS

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = ("4.0", "4.1", "4.2", "4.3")
MODES = ("classic", "connect")
SECONDS = 1800
_EXTRAS = ("cli", "uvloop", "spark", "server")


def environment(where: Path, version: str) -> Path:
    """Its Python, with everything but Postroom, which is taken from this checkout."""
    home = where / version
    python, stamp = home / "bin" / "python", home / "installed"
    if not stamp.exists():
        settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        extras = settings["optional-dependencies"]
        named = [*settings["dependencies"], *(one for name in _EXTRAS for one in extras[name])]
        needed = [one for one in named if not one.startswith("postroom[")]
        pins = (ROOT / "constraints.txt").read_text().splitlines()
        where.mkdir(parents=True, exist_ok=True)
        constraints = where / "constraints.txt"
        constraints.write_text(
            "\n".join(pin for pin in pins if not pin.lower().startswith(("pyspark==", "py4j==")))
        )
        subprocess.run([sys.executable, "-m", "venv", home], check=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", constraints]
        subprocess.run([*pip, f"pyspark[connect]=={version}.*", *needed], check=True)
        stamp.touch()
    return python


def tried(python: Path, checks: tuple[str, ...], mode: str) -> dict[str, str]:
    """What came of each check; the version itself is among them."""
    environ = {n: value for n, value in os.environ.items() if not n.startswith(("SPARK_", "PYSPARK_"))}
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    with tempfile.TemporaryDirectory(prefix="postroom-spark-") as folder:
        done = subprocess.run(
            [python, "-m", "tests.spark_versions.checks", mode, folder, *checks],
            cwd=folder,
            env=environ,
            stdout=subprocess.PIPE,
            text=True,
            timeout=SECONDS,
        )
    found: dict[str, str] = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.spark_versions", description=__doc__)
    parser.add_argument("versions", nargs="*", default=VERSIONS, metavar="VERSION")
    parser.add_argument("--where", type=Path, default=Path(tempfile.gettempdir()) / "postroom-spark-versions")
    parser.add_argument("--mode", action="append", choices=MODES, help="may be repeated; default: both")
    parser.add_argument("--only", action="append", choices=sorted(CHECKS), help="one check; may be repeated")
    wish = parser.parse_args()
    checks = tuple(wish.only or CHECKS)
    columns: dict[str, dict[str, str]] = {}
    for version in wish.versions:
        python = environment(wish.where, version)
        for mode in wish.mode or MODES:
            found = tried(python, checks, mode)
            columns[f"{found.pop('version', version)} {mode}"] = found
            print(version, mode, found, file=sys.stderr, flush=True)
    print("| what | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for check in checks:
        print(f"| {check} | " + " | ".join(one.get(check, "did not end") for one in columns.values()) + " |")
    return (
        0 if all(found.get(one) in ("ok", "refused") for found in columns.values() for one in checks) else 1
    )


if __name__ == "__main__":
    sys.exit(main())
