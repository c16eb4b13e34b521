"""Where the servers' programs are, and what to tell the user when they are not there.

Debian keeps PostgreSQL's programs out of PATH, one folder per version, and MariaDB's server in `/usr/sbin`,
which is not in a plain user's PATH. So both places are searched after PATH.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

__all__ = [
    "MARIADB_FOLDERS",
    "POSTGRES_FOLDERS",
    "MissingServer",
    "find_mariadb",
    "find_mysql",
    "find_pgbouncer",
    "find_postgres",
]

POSTGRES_FOLDERS = ("/usr/lib/postgresql/*/bin", "/usr/pgsql-*/bin", "/opt/homebrew/opt/postgresql@*/bin")
MARIADB_FOLDERS = ("/usr/sbin", "/usr/bin", "/usr/local/sbin", "/usr/local/bin")


class MissingServer(Exception):
    """A server is not installed. The message names it and the command that installs it."""

    sentence: ClassVar[str] = "server is not installed."  # in every message: the summary looks for it

    def __init__(self, name: str, package: str, install: str = "") -> None:
        super().__init__(f"{name}'s {self.sentence} Install it: {install or _install_command(package)}")


def find_postgres() -> Path:
    """The folder with `postgres` and `initdb`: that of PATH, else the newest version elsewhere."""
    for folder in [*_path(), *_expand(POSTGRES_FOLDERS)]:
        if all(_is_program(folder / name) for name in ("postgres", "initdb")):
            return folder
    raise MissingServer("PostgreSQL", "postgresql")


def find_mariadb() -> tuple[Path, Path]:
    """The server, and the program that makes its data folder, which a `mysqld` of MySQL does not have."""
    everywhere = os.pathsep.join(str(folder) for folder in [*_path(), *_expand(MARIADB_FOLDERS)])
    server = shutil.which("mariadbd", path=everywhere) or shutil.which("mysqld", path=everywhere)
    installer = shutil.which("mariadb-install-db", path=everywhere)
    if server is None or installer is None:
        raise MissingServer("MariaDB", "mariadb-server")
    return Path(server), Path(installer)


def find_mysql() -> Path:
    """MySQL's own server: the one named, else the one that `make mysql` has made."""
    program = Path(os.environ.get("POSTROOM_MYSQLD", "build/mysql/mysqld")).absolute()
    if not _is_program(program):
        raise MissingServer("MySQL", "mysql", "make mysql (or name one: POSTROOM_MYSQLD=/usr/sbin/mysqld)")
    return program


def find_pgbouncer() -> Path:
    everywhere = os.pathsep.join(str(folder) for folder in [*_path(), *_expand(MARIADB_FOLDERS)])
    program = shutil.which("pgbouncer", path=everywhere)
    if program is None:
        raise MissingServer("PgBouncer", "pgbouncer")
    return Path(program)


def _path() -> list[Path]:
    return [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]


def _expand(patterns: Sequence[str]) -> list[Path]:
    """The folders that exist; of one pattern the highest version first."""
    found: list[Path] = []
    for pattern in patterns:
        matches = Path("/").glob(pattern.lstrip("/"))
        found += sorted(
            matches, key=lambda path: [int(n) for n in re.findall(r"\d+", str(path))], reverse=True
        )
    return found


def _is_program(path: Path) -> bool:
    return os.access(path, os.X_OK) and path.is_file()  # in this order: PATH may name folders closed to us


def _install_command(package: str) -> str:
    if sys.platform == "darwin":
        return f"brew install {package.removesuffix('-server')}"
    if shutil.which("apt-get") is None:
        return f"the package that Debian calls {package}"
    sudo = "" if os.geteuid() == 0 else "sudo "
    return f"{sudo}apt-get install -y --no-install-recommends {package}  (or, as root: make servers)"
