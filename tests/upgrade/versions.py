"""Earlier versions of Postroom, as the repository's history has them: told by their schema."""

from __future__ import annotations

import subprocess
import tarfile
from io import BytesIO
from pathlib import Path

__all__ = ["Missing", "before", "fetch"]

_ROOT = Path(__file__).parents[2]
_SCHEMA = "src/postroom/store/sql/schema.py"


class Missing(Exception):
    """The history is not here: a checkout without git, or one that is cut off."""


def before(migration: int) -> str:
    """Return the last commit that did not have this migration."""
    found = _git("log", "--format=%H", f"-S\n_{migration}_", "--", _SCHEMA).decode().split()
    if not found:
        raise Missing(f"no commit that adds migration {migration} is known here")
    return _git("rev-parse", "--verify", f"{found[-1]}^").decode().strip()


def fetch(commit: str, folder: Path) -> Path:
    """Return where its modules are, in a folder that is made."""
    folder.mkdir()
    with tarfile.open(fileobj=BytesIO(_git("archive", commit, "src", "pyproject.toml"))) as archive:
        archive.extractall(folder, filter="data")
    return folder / "src"


def _git(*arguments: str) -> bytes:
    try:
        done = subprocess.run(["git", "-C", str(_ROOT), *arguments], capture_output=True)
    except FileNotFoundError as error:
        raise Missing("git is not installed") from error
    if done.returncode != 0:
        raise Missing(done.stderr.decode(errors="replace").strip())
    return done.stdout
