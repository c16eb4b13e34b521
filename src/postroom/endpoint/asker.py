"""Who asks a queue something, for whatever is done meanwhile: the audit log names them.

A door (`wire.server`, `http`, `kafka`, the command line) says so once for each request, around all that it
does for it; nothing below passes it on. Whoever comes through none of them is a program that has the queue's
database itself: it is the user that runs it.

Decides nothing about permissions: those are asked with the principal itself, explicitly.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

from ..model.audit import Asker

__all__ = ["asked_by", "asker", "this_user"]

_asker: ContextVar[Asker | None] = ContextVar("postroom_asker", default=None)


def asker() -> Asker:
    """Return who asks what is being done now."""
    return _asker.get() or this_user("embedded")


@contextmanager
def asked_by(who: Asker) -> Iterator[None]:
    """What is done within is asked by them."""
    before = _asker.set(who)
    try:
        yield
    finally:
        _asker.reset(before)


@cache
def this_user(door: str) -> Asker:
    """Return the user that runs this process: by its number, since its environment may say anything."""
    try:
        import pwd

        name = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a user without a name, as containers have them
        name = f"uid-{os.getuid()}"
    except ImportError:  # Windows
        name = os.environ.get("USERNAME", "unknown")
    return Asker(name, door, socket.gethostname())
