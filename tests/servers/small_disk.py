"""Servers on a small disk that can be filled: a file system in memory, mounted for each. Needs root on Linux.

fill()         nothing can be written any more
free()         it can
start_again()  whether it ended for that or not
"""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

from .mariadb import MariaServer
from .postgres import PostgresServer
from .server import Server

__all__ = ["MariaOnSmallDisk", "NoMount", "OnSmallDisk", "PostgresOnSmallDisk"]

_SIZE = "400m"  # a new server takes 60 to 120 MB


class NoMount(Exception):
    """A file system of its own cannot be mounted here."""


class OnSmallDisk(Server):
    _mounted = False

    def _hand_over(self, folder: Path) -> None:
        if folder == self.folder:
            self._mount()
        super()._hand_over(folder)

    def _mount(self) -> None:
        options = f"size={_SIZE},mode=700"
        try:
            _run("mount", "-t", "tmpfs", "-o", options, "postroom-small-disk", str(self.folder))
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", "") or error
            raise NoMount(f"a small disk cannot be mounted here: {said}") from error
        self._mounted = True

    @property
    def _ballast(self) -> Path:
        return self.folder / "ballast"

    def fill(self) -> None:
        with self._ballast.open("ab") as file:
            piece = 64 << 20
            while piece >= 4096:
                try:
                    os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), piece)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    piece //= 2

    def free(self) -> None:
        self._ballast.unlink()

    def start_again(self) -> None:
        if self.runs:
            self.kill()
        self._gone()
        self.start()

    def close(self) -> None:
        self._ballast.unlink(missing_ok=True)
        if self._process is not None and not self.runs:
            self._gone()
        if self._mounted:
            self._mounted = False
            self._end_and_unmount()
        else:
            super().close()

    def _end_and_unmount(self) -> None:
        """The folder can be removed only when nothing is mounted there any more."""
        try:
            if self._process is not None:
                self.kill()
        finally:
            self._free_memory()
            _run("umount", "-l", str(self.folder))
            super().close()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


class PostgresOnSmallDisk(OnSmallDisk, PostgresServer):
    pass


class MariaOnSmallDisk(OnSmallDisk, MariaServer):
    pass
