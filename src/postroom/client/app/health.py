"""Health: how each handler of an app is doing, for people and for probes.

Decides which of three states a handler is in, from the error that stopped it: it runs; it waits for something
that comes by itself or that somebody is about to make (a topic, a database that is away); or it failed, and
somebody has to look. Whatever the state, it is tried again. An error is logged when it is new, not each time
it is met again. Must never hold up a handler, and may be read from any thread.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from ...errors import (
    AccessError,
    CatalogError,
    ClosedError,
    ForkError,
    GenerationChanged,
    PostroomError,
    UnknownFate,
    UnknownGroup,
    UnknownPartition,
    UnknownTopic,
)

__all__ = ["AppHealth", "HandlerHealth", "Standing", "State", "is_final", "may_mend"]

log = logging.getLogger("postroom.app")

State = Literal["running", "waiting", "failed"]


@dataclass(frozen=True, slots=True)
class HandlerHealth:
    """How one handler is doing."""

    name: str
    topic: str
    group: str
    state: State
    since: datetime  # of the state
    error: str | None  # what it waits for, or what is wrong; None: it runs


@dataclass(frozen=True, slots=True)
class AppHealth:
    """How an app is doing; `ok` is what a probe wants to know."""

    running: bool  # between start() and stop()
    handlers: tuple[HandlerHealth, ...]

    @property
    def ok(self) -> bool:
        """The app runs, and so does every handler of it."""
        return self.running and all(one.state == "running" for one in self.handlers)

    def as_dict(self) -> dict[str, Any]:
        """For an answer in JSON."""
        handlers = [{**asdict(one), "since": one.since.isoformat()} for one in self.handlers]
        return {"ok": self.ok, "running": self.running, "handlers": handlers}


def may_mend(error: BaseException) -> bool:
    """Whether waiting may help: the topic is not there yet, or the store or broker is away or busy."""
    passing = UnknownTopic | UnknownPartition | UnknownFate | GenerationChanged
    return isinstance(error, passing) or (isinstance(error, PostroomError) and error.retriable)


def is_final(error: BaseException) -> bool:
    """The connection itself is gone: nothing can be tried on it any more."""
    return isinstance(error, ClosedError | ForkError)


class Standing:
    """The state of one handler, and what the log was told of it."""

    def __init__(self, name: str, topic: str, group: str) -> None:
        self._name, self._topic, self._group = name, topic, group
        self._state: State = "waiting"
        self._since = datetime.now(UTC)
        self._error: str | None = "it has not started yet"
        self._told: str | None = None  # the last error that was logged, since it ran
        self._ran = False

    @property
    def health(self) -> HandlerHealth:
        return HandlerHealth(self._name, self._topic, self._group, self._state, self._since, self._error)

    def runs(self) -> None:
        if self._told is not None:
            log.info("%s runs again" if self._ran else "%s runs now", self._name)
        self._told, self._ran = None, True
        self._enter("running", None)

    def stopped_by(self, error: BaseException) -> None:
        """It does not run now, because of that. What ended it may be gone when it starts again."""
        text, joins_again = _described(error), _is_forgotten(error)
        if joins_again:
            text = "its member was forgotten; it joins again"
        elif isinstance(error, UnknownTopic):
            text = self._waiting_for(error)
        passing = self._state == "running" or joins_again or may_mend(error)
        self._enter("waiting" if passing and not is_final(error) else "failed", text)
        if text == self._told:
            return
        self._told = text
        if joins_again or isinstance(error, UnknownTopic):
            log.warning("%s: %s", self._name, text)
        elif self._state == "waiting":
            log.warning("%s starts again after an error: %r", self._name, error, exc_info=error)
        else:
            own = None if isinstance(error, CatalogError | AccessError) else error  # its sentence says it all
            log.error("%s cannot go on and is tried again: %s", self._name, text, exc_info=own)

    def _enter(self, state: State, error: str | None) -> None:
        if state != self._state:
            self._state, self._since = state, datetime.now(UTC)
        self._error = error

    def _waiting_for(self, error: UnknownTopic) -> str:
        topic = str(error.details.get("topic", self._topic))
        close: Sequence[str] = error.details.get("close", ())
        meant = f" (did you mean {' or '.join(map(repr, close))}?)" if close else ""
        gone = "was deleted" if self._ran else "does not exist yet"
        return (
            f"topic {topic!r} {gone}{meant}; waiting for it — create it with `postroom topic create {topic}`"
        )


def _is_forgotten(error: BaseException) -> bool:
    """A member of a broadcast group whose own group is gone: it only has to join again."""
    return isinstance(error, UnknownGroup) and "member" in error.details


def _described(error: BaseException) -> str:
    text = str(error)
    return (
        text if isinstance(error, PostroomError) and text else f"{type(error).__name__}: {text}".rstrip(": ")
    )
