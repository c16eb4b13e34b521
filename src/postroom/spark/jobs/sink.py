"""A file below a table, where the table is: in a folder here, or at an address of an object store.

What is in a folder is on the disk when the file is closed.
"""

from __future__ import annotations

import os
from typing import Any

from .lake import is_uri

__all__ = ["Sink"]


class Sink:
    def __init__(self, table: str, path: str) -> None:
        """`path` is below the table; a file that is there already is an error."""
        self._local = None if is_uri(table) else os.path.join(table, path)
        if self._local is not None:
            os.makedirs(os.path.dirname(self._local), exist_ok=True)
            self.stream: Any = open(self._local, "xb")  # noqa: SIM115  (closed by `close`)
        else:
            from pyarrow.fs import FileSystem

            system, root = FileSystem.from_uri(table)
            self.stream = system.open_output_stream(f"{root}/{path}")

    def close(self) -> int:
        """How many bytes it has."""
        size: int = self.stream.tell()
        if self._local is not None:
            self.stream.flush()
            os.fsync(self.stream.fileno())
        self.stream.close()
        return size
