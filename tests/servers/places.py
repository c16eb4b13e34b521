"""Where a server may live: the account that runs it, the folder above its own, and its port."""

from __future__ import annotations

import os
import pwd
import random
import socket
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path

__all__ = ["HOST", "account", "base_folder", "free_port", "memory_folder"]

HOST = "127.0.0.1"
# Below the range from which Linux takes ports for outgoing connections: one of those could otherwise
# occupy the port of a server that is stopped for a moment.
PORTS = range(20_000, 32_000)
_MEMORY = Path("/dev/shm")
_ROOM = 4 << 30  # bytes; a whole run takes a quarter of it


def account(names: Sequence[str]) -> pwd.struct_passwd | None:
    """Who runs a server: ourselves (None), or, as servers refuse root, the first of `names` that exists."""
    if os.geteuid() != 0:
        return None
    known = {entry.pw_name: entry for entry in pwd.getpwall()}
    for name in names:
        if name in known:
            return known[name]
    raise RuntimeError(f"A server must not run as root, and none of the users {', '.join(names)} exists.")


def base_folder() -> Path:
    """The usual temporary folder, if any account may enter it: a TMPDIR is often closed to others."""
    for folder in map(Path, (tempfile.gettempdir(), "/tmp", "/var/tmp")):
        path = folder.resolve()
        if os.geteuid() != 0 or all(p.stat().st_mode & stat.S_IXOTH for p in (path, *path.parents)):
            return path
    raise RuntimeError("No temporary folder that other users may enter; set TMPDIR to one (chmod o+x).")


def memory_folder() -> Path | None:
    """A folder in memory, where there is room: to flush costs nothing there. POSTROOM_TEST_DISK=1 says no."""
    if os.environ.get("POSTROOM_TEST_DISK") or not os.access(_MEMORY, os.W_OK | os.X_OK):
        return None
    space = os.statvfs(_MEMORY)
    return _MEMORY if space.f_bavail * space.f_frsize >= _ROOM else None


def free_port() -> int:
    """A port nobody listens on at this moment."""
    for port in random.sample(PORTS, 100):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"No free port between {PORTS.start} and {PORTS.stop} in a hundred tries.")
