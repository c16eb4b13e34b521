"""What stands nowhere in the repository: the name that the project had before it was called Postroom."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FORMER = "kcotsnep"[::-1]  # backwards, so that it does not stand here either


def files(root: Path) -> list[Path]:
    """What git tracks, and what it would if it were told to: a new file counts before its commit."""
    line = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(line, capture_output=True, check=True, timeout=60).stdout
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("this is not a checkout")
    return [Path(name) for name in listed.decode().split("\0") if name and (root / name).is_file()]


def spelt(root: Path, listed: list[Path]) -> list[str]:
    """Files with the name in their path or in their bytes, in any case."""
    return [
        str(path)
        for path in listed
        if FORMER in str(path).lower() or FORMER.encode() in (root / path).read_bytes().lower()
    ]


def test_the_former_name_stands_nowhere() -> None:
    listed = files(ROOT)
    assert Path("README.md") in listed and Path(__file__).relative_to(ROOT) in listed and len(listed) > 500
    assert spelt(ROOT, listed) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("notes.md", f"{FORMER} is a queue"),
        ("notes.md", f"import {FORMER.upper()}_URL"),
        (f"docs/{FORMER.title()}.md", ""),
        ("data.bin", f"\0\1{FORMER.title()}\0"),
    ],
)
def test_it_would_be_found(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    (tmp_path / "other.md").write_text("a queue")
    assert spelt(tmp_path, [Path("other.md"), Path(name)]) == [name]
