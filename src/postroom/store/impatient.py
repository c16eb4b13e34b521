"""A connection to PostgreSQL that does not wait for ever.

TCP notices a peer that is gone (keepalives, user time-out), but not one that takes our bytes and never
answers: a server that hangs, a proxy with nothing behind it. Whoever waits for longer than `patience_s` is
told so, and the connection is given up: what it was waiting for is of unknown fate (I15, I2).
"""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any

import psycopg

__all__ = ["ImpatientConnection"]


class ImpatientConnection(psycopg.Connection[Any]):  # type: ignore[misc, unused-ignore]
    patience_s = 3600.0  # for one answer

    def wait(self, gen: Generator[Any, Any, Any], *args: Any, **kwargs: Any) -> Any:
        return super().wait(self._limited(gen), *args, **kwargs)

    def _limited(self, gen: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """The same steps; those who run them also look in when nothing has come for a while."""
        deadline = time.monotonic() + self.patience_s
        try:
            wanted = next(gen)
            while True:
                ready = yield wanted
                if not ready and time.monotonic() > deadline:
                    self.pgconn.finish()
                    raise psycopg.OperationalError(f"no answer for {self.patience_s:g} s")
                wanted = gen.send(ready)
        except StopIteration as done:
            return done.value
