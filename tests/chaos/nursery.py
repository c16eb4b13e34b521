"""A process from which others are forked: everything is imported already, so they live after milliseconds.

    python -m tests.chaos.nursery

Talks in lines of JSON on its standard input and output: `["start", role, arguments, errors]` is answered by
the process's id, `["kill", id]` and `["stop", id]` by how the process ended. It kills all of them when its
input ends, and so when whoever started it is gone. It never connects to anything itself: a fork begins with
clean hands.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Coroutine
from contextlib import suppress
from importlib import import_module
from typing import Any

from .broker_process import serve
from .changer_process import change
from .consumer_process import consume
from .member_process import belong
from .operator_process import operate
from .producer_process import produce

__all__ = ["ROLES"]

ROLES: dict[str, Callable[..., Coroutine[Any, Any, None]]] = {
    "producer": produce,
    "consumer": consume,
    "member": belong,
    "changer": change,
    "broker": serve,
    "operator": operate,
}

_STORES = ("store.dialects.mysql", "store.dialects.postgres", "store.dialects.sqlite")
_LATE = ("broker.broker", "client.connection", "wire.server.server", *_STORES)
"""What Postroom imports only when somebody connects."""


def _start(role: str, arguments: list[Any], errors: str) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        os.dup2(0, 1)
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        faulthandler.enable()  # a crash leaves where it was
        asyncio.run(ROLES[role](*arguments))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _end(child: int, by: signal.Signals = signal.SIGKILL) -> int:
    """How it ended: minus the signal, or its exit code if it ended by itself."""
    os.kill(child, by)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> None:
    for name in _LATE:
        with suppress(ModuleNotFoundError):  # another version has it elsewhere
            import_module(f"postroom.{name}")
    children: set[int] = set()
    while line := sys.stdin.readline():
        verb, *rest = json.loads(line)
        if verb == "start":
            answer = _start(*rest)
            children.add(answer)
        else:
            children.discard(rest[0])
            answer = _end(rest[0], signal.SIGKILL if verb == "kill" else signal.SIGTERM)
        print(answer, flush=True)
    for child in children:
        _end(child)


if __name__ == "__main__":
    main()
