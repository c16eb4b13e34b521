"""Failures: Postroom's errors in the words that kombu knows.

An error that may pass is a lost connection for kombu: publishing is tried again as Celery's retry policy
says, and a worker connects anew. Any other is the caller's, and is raised as it is: its sentence says what to
do. Must never hide an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from amqp.exceptions import ConnectionError as LostConnection
from kombu.exceptions import ChannelError

from ...errors import ClosedError, ForkError, PostroomError

__all__ = ["Unreachable", "no_queue", "translated"]


class Unreachable(LostConnection):  # type: ignore[misc]
    """Postroom could not do it now."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


@contextmanager
def translated() -> Iterator[None]:
    try:
        yield
    except PostroomError as error:
        if error.retriable or isinstance(error, ClosedError | ForkError):
            raise Unreachable(str(error)) from error
        raise


def no_queue(name: str) -> ChannelError:
    return ChannelError(
        f"NOT_FOUND - there is no queue {name!r}: declare it, or start a worker for it "
        f"(celery worker -Q {name})",
        (50, 10),
        "Channel.queue_declare",
        "404",
    )
