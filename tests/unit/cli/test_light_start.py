"""The base install is light: what it needs, what it weighs, and what the command says without its extra."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import tomllib
from importlib.metadata import PackageNotFoundError, distribution, requires
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
MOST_BYTES = 30 << 20
PYTHON_AND_BYTECODE = 2.6  # compiled modules take more room than their source
EXTRAS = ("typer", "rich", "uvloop", "click", "pydantic", "fastapi", "psycopg", "pymysql", "pyspark", "kio")
PROGRAM = """
import asyncio, dataclasses
import postroom, postroom.sync, postroom.testing.plugin

@dataclasses.dataclass
class Order:
    number: int

app, seen = postroom.App("memory://light"), []

@app.subscribe("orders", group="billing")
async def bill(order: Order) -> None:
    seen.append(order.number)

async def main() -> None:
    await app.start(create=True)
    await bill.send(Order(7))
    async with asyncio.timeout(30):
        while not seen:
            await asyncio.sleep(0.01)
    await app.stop()

asyncio.run(main())
with postroom.sync.connect("memory://") as mq:
    mq.create_topic("orders")
    print(mq.send("orders", b"1").topic, seen)
"""


def needed(name: str, found: set[str]) -> set[str]:
    """What a package of the base install brings along, itself included."""
    if name.lower() in found:
        return found
    found.add(name.lower())
    try:
        lines = requires(name) or []
    except PackageNotFoundError:  # of another platform or version of Python
        return found
    for line in lines:
        if "extra ==" not in line:
            needed(re.split(r"[^\w.-]", line)[0], found)
    return found


def base() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found: set[str] = set()
    for line in project["dependencies"]:
        needed(re.split(r"[^\w.-]", line)[0], found)
    return found


def weight(name: str) -> int:
    try:
        files = distribution(name).files or []
    except PackageNotFoundError:
        return 0
    paths = [Path(str(one.locate())) for one in files]
    return sum(path.stat().st_size for path in paths if path.is_file())


def test_the_base_install_stays_below_30_mb() -> None:
    ours = sum(path.stat().st_size for path in (ROOT / "src").rglob("*.py")) * PYTHON_AND_BYTECODE
    others = {name: weight(name) for name in base()}
    assert others["msgspec"] > 100_000 and others["aiokafka"] > 1_000_000  # they are weighed, not missed
    assert ours + sum(others.values()) < MOST_BYTES, others


def test_what_extras_bring_is_not_in_the_base() -> None:
    assert base() & set(EXTRAS) == set()


def run_without_extras(
    folder: Path, *words: str, extras: tuple[str, ...] = tuple(EXTRAS)
) -> subprocess.CompletedProcess[str]:
    hidden = f"import sys; sys.modules.update(dict.fromkeys({extras}))"
    (folder / "sitecustomize.py").write_text(hidden)
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={"PYTHONPATH": f"{folder}:{ROOT / 'src'}", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_programs_run_without_any_extra(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    done = run_without_extras(tmp_path, "program.py")
    assert (done.returncode, done.stdout) == (0, "orders [7]\n"), done.stderr


@pytest.mark.parametrize("words", [(), ("--help",), ("worker", "shop:app")])
def test_the_command_without_its_extra_says_what_to_type(tmp_path: Path, words: tuple[str, ...]) -> None:
    done = run_without_extras(tmp_path, "-m", "postroom", *words)
    said = "error: the command needs typer, which is not installed: run `pip install '.[cli]'` in a checkout"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"{said} of Postroom\n")


def test_what_is_missing_for_another_reason_is_not_blamed_on_the_extra(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import no_such_package")
    done = subprocess.run(
        [sys.executable, "-m", "postroom"],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1 and "No module named 'no_such_package'" in done.stderr


def test_the_console_without_its_extra_says_what_to_type(tmp_path: Path) -> None:
    """The demo of the light start ends by naming it."""
    words = ("-m", "postroom", "console", "memory://")
    ran = run_without_extras(tmp_path, *words, extras=("fastapi", "uvicorn"))
    assert ran.returncode != 0 and "pip install '.[server]'" in ran.stderr, ran.stderr
    assert "Traceback" not in ran.stderr
