"""A subscription: which messages a handler gets, how many at once, what failures mean, who is answered.

Decides what `@app.subscribe` and `@app.reply` may be given, when the handler is registered and not when the
first message comes. Must never open anything: what the store thinks of it (an unknown topic, a group that is
set otherwise) is found out when the app starts.

A handler that replies (R38) is an ordinary subscription that also answers: what the handler returns, once its
middleware has ended, is the reply, and the request is acked when that is stored. Its ending means for who
asked:

    returned                      the reply
    raised RetryLater             tried again then, if that is before the deadline; else as below
    raised Dead                   RequestFailed, and a dead letter
    raised anything else          RequestFailed, at once; it is not tried again: its requester decides
    the body does not fit         RequestFailed; likewise
    the deadline has passed       not handled at all; counted

A handler of lists returns a list, with the reply to each in the order of the requests; what it raises is told
to each of them. A message that is no request is handled as by `@app.subscribe`, and what is returned is
dropped. Must never leave a requester waiting for what has failed already, and never ack a request whose
answer is not stored.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeAlias

from ...config import DEFAULTS
from ...errors import InvalidSetting, PostroomError, RequestFailed, UsageError
from ...model.delivery.retry import Backoff
from ...model.messages.requests import Failure
from ...model.topology.names import check_broadcast, check_group, check_member, check_task, check_topic
from ...units import Duration, duration_ms, size_bytes
from ..admin import group_wish
from ..message import Received
from ..requests import answer, answers_of, fail
from .handler import Dead, Failed, Handler, RetryLater, encoded, traced

__all__ = [
    "AckMode",
    "Answering",
    "Batch",
    "MissedHook",
    "Subscription",
    "chosen",
    "make_reply",
    "make_subscription",
    "merged",
    "smallest_window",
    "window_for",
    "with_concurrency",
]


AckMode = Literal["manual", "after", "on_delivery"]
MissedHook: TypeAlias = Callable[[], Any]
"""Told that messages may have been missed: plain, or a coroutine function."""

_MOST_AT_ONCE = 10_000


@dataclass(frozen=True, slots=True)
class Batch:
    """A handler takes a list as one unit of work: up to so many messages and bytes, or what came in time.

    `linger` is how long the first message of a list waits for others. 0 (the default): not at all; under
    light load a message is handled at once, under heavy load lists fill by themselves.
    """

    count: int = 100
    bytes: int | str = "1MB"
    linger: Duration = 0
    size: int = field(init=False, repr=False, compare=False)
    linger_s: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _whole("Batch.count", self.count)
        object.__setattr__(self, "size", size_bytes(self.bytes, name="Batch.bytes"))
        object.__setattr__(self, "linger_s", duration_ms(self.linger, name="Batch.linger") / 1000)

    @staticmethod
    def of(given: Batch | int | tuple[Any, ...] | None) -> Batch | None:
        """`100`, `(100, "1MB", 0.5)` or a Batch."""
        if given is None or isinstance(given, Batch):
            return given
        if isinstance(given, int) and not isinstance(given, bool):
            return Batch(given)
        if isinstance(given, tuple) and 1 <= len(given) <= 3:
            return Batch(*given)
        raise InvalidSetting(
            f"batch={given!r}: a number of messages such as 100, or postroom.Batch(100, '1MB', linger=0.5)",
            name="batch",
        )


class Answering(Protocol):
    """What a subscription to requests does besides (R38)."""

    def is_over(self, message: Received) -> bool:
        """Nobody waits for the answer any more: it is not to be handled."""

    async def answered(self, message: Received, returned: Any) -> Failed | None:
        """Send what the handler returned; returns what went wrong with that."""

    async def failed(self, message: Received, error: BaseException) -> Failed:
        """Tell who asked, unless it is to be tried again; returns what to make of the message."""


@dataclass(frozen=True, slots=True)
class Subscription:
    topic: str
    group: str
    handler: Handler
    concurrency: int
    batch: Batch | None
    timeout_s: float | None
    retry: Backoff
    ack: AckMode
    window: int | None  # None: as much as the handler gets done in a moment
    consumer: Mapping[str, Any]  # what the group is asked for: mode, order, start, lease, max_attempts, …
    answering: Answering | None = None
    on_missed: MissedHook | None = None
    task: str | None = None  # its name among the tasks of the topic and group
    tasks: tuple[Subscription, ...] = ()  # several that share a consumer; this stands for all of them

    @property
    def member(self) -> str | None:
        """Its name in a broadcast group, if it has one."""
        found: str | None = self.consumer.get("member")
        return found

    @property
    def broadcast(self) -> bool:
        return self.consumer.get("mode") == "broadcast"

    @property
    def name(self) -> str:
        member = "" if self.member is None else f"@{self.member}"
        handlers = ", ".join(one.handler.name for one in self.tasks or (self,))
        return f"{self.topic}/{self.group}{member} ({handlers})"

    def shares_with(self, other: Subscription) -> bool:
        """Whether each message would go to this handler or the other, at random."""
        if (self.topic, self.group) != (other.topic, other.group):
            return False
        if self.task != other.task:
            return False  # a message says which of them it is for
        apart = self.member != other.member or self.member is None
        return not (self.broadcast and other.broadcast and apart)


def make_subscription(
    function: Callable[..., Any],
    scope: Mapping[str, Any],
    *,
    topic: str,
    group: str,
    concurrency: int,
    batch: Batch | int | tuple[Any, ...] | None,
    timeout: Duration | None,
    retry: Backoff,
    ack: AckMode,
    window: int | None,
    on_missed: MissedHook | None = None,
    name: str | None = None,
    **consumer: Any,
) -> Subscription:
    if not isinstance(retry, Backoff):
        raise InvalidSetting(f"retry={retry!r}: such as postroom.Backoff(1, 2, '10m')", name="retry")
    if ack not in ("manual", "after", "on_delivery"):
        raise InvalidSetting(f"ack={ack!r}: choose 'after', 'manual' or 'on_delivery'", name="ack")
    timeout_ms = None if timeout is None else duration_ms(timeout, name="timeout")
    if timeout_ms == 0:
        raise InvalidSetting("timeout=0 leaves no time at all: leave it out, or give some", name="timeout")
    lists = Batch.of(batch)
    _check_consumer(group, **consumer)
    _check_on_missed(on_missed, consumer["mode"])
    if name is not None and (lists is not None or consumer["mode"] == "broadcast"):
        what = "batch=" if lists is not None else "mode='broadcast'"
        raise UsageError(
            f"name={name!r} tells tasks of one group apart, and {what} has but one: leave it out"
        )
    return Subscription(
        topic=check_topic(topic),
        group=check_group(group),
        handler=Handler.of(function, many=lists is not None, scope=scope),
        concurrency=_whole("concurrency", concurrency),
        batch=lists,
        timeout_s=None if timeout_ms is None else timeout_ms / 1000,
        retry=retry,
        ack=ack,
        window=None if window is None else _whole("window", window, 2**31),
        consumer={name: value for name, value in consumer.items() if value is not None},
        on_missed=on_missed,
        task=None if name is None else check_task(name),
    )


_SHARED = ("concurrency", "batch", "window", "ack", "answering", "on_missed")  # one consumer has one of each


def merged(parts: Sequence[Subscription]) -> Subscription:
    """Return one subscription for the tasks of a topic and group: they share its consumer and its lanes.

    Each keeps its own timeout and retry. What belongs to the consumer or the group is named by one of them,
    or by all alike; else UsageError.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    settings = dict(first.consumer)
    for other in parts[1:]:
        for name in _SHARED:
            _refuse_unlike(first, other, name, getattr(first, name), getattr(other, name))
        for name, value in other.consumer.items():
            _refuse_unlike(first, other, name, settings.setdefault(name, value), value)
    return replace(first, consumer=settings, tasks=tuple(parts), task=None)


def _refuse_unlike(one: Subscription, other: Subscription, name: str, mine: object, others: object) -> None:
    if mine == others:
        return
    if name in ("answering", "batch"):
        raise UsageError(
            f"{one.handler.name} and {other.handler.name} cannot share topic {one.topic!r} and group "
            f"{one.group!r}: handlers of lists and of requests have a group of their own; give one another"
        )
    raise UsageError(
        f"{one.handler.name} has {name}={mine!r} and {other.handler.name} has {name}={others!r}: tasks of "
        "one topic and group share it; give both the same, or one of them another group"
    )


def chosen(all: Sequence[Subscription], names: Sequence[str]) -> list[Subscription]:
    """Return the handlers with these names: the function's, the task's, or topic/group.

    Tasks that share a topic and group are chosen together: who reads for the group reads for all of them, and
    a message for a task that is not there would be a dead letter. UsageError says so, or which there are.
    """
    known = [{one.handler.name, one.task, f"{one.topic}/{one.group}"} for one in all]
    for name in names:
        if not any(name in each for each in known):
            there = ", ".join(dict.fromkeys(one.handler.name for one in all)) or "none"
            raise UsageError(f"there is no handler {name!r}: the app has {there}")
    found = [one for one, each in zip(all, known, strict=True) if each & set(names)]
    for one in all:
        if one not in found and not one.broadcast:
            for other in found:
                if (one.topic, one.group) == (other.topic, other.group):
                    raise UsageError(
                        f"{other.handler.name} shares topic {one.topic!r} and group {one.group!r} with "
                        f"{one.handler.name}: choose both, or {one.topic}/{one.group} for all of them"
                    )
    return found


def with_concurrency(one: Subscription, concurrency: int) -> Subscription:
    """Return the same handler, so many times at once."""
    return replace(one, concurrency=_whole("concurrency", concurrency))


def smallest_window(subscription: Subscription) -> int:
    """Enough for everything at work and as much again waiting."""
    each = 1 if subscription.batch is None else subscription.batch.count
    return 2 * subscription.concurrency * each


def window_for(subscription: Subscription, seconds_each: float | None, *, ordered: bool = False) -> int:
    """How many messages to hold, given what one costs: what is done in half a second, within limits.

    A member that held more than it can handle soon would keep it from others (R18, R41). Not so in an ordered
    group, where others do not get it anyway: there it holds as much as it may, to see many keys.
    """
    if subscription.window is not None:
        return subscription.window
    least = smallest_window(subscription)
    if ordered:
        return max(least, DEFAULTS.window_messages)
    if seconds_each is None:
        return least
    soon = 0.5 * subscription.concurrency / max(seconds_each, 1e-9)
    return max(least, int(min(soon, DEFAULTS.window_messages)))


def _check_consumer(
    group: str,
    mode: Any,
    order: Any,
    start: Any,
    lease: Any,
    max_attempts: Any,
    exhausted: Any,
    max_hold: Any,
    expires: Any = None,
    slow_lane: Any = None,
    member: Any = None,
    max_handling: Any = None,
    window_bytes: Any = None,
) -> None:
    group_wish(mode, order, start, lease, max_attempts, exhausted, max_hold, expires, slow_lane)
    if mode == "broadcast":
        check_broadcast(check_group(group))
    elif member is not None:
        raise UsageError(
            f"member={member!r} names a member of a broadcast group: add mode='broadcast', or leave it out"
        )
    if member is not None:
        check_member(member)
    if max_handling is not None and not duration_ms(max_handling, name="max_handling"):
        raise InvalidSetting("max_handling=0 leaves no time to handle anything: such as '2h'")
    if window_bytes is not None and not size_bytes(window_bytes, name="window_bytes"):
        raise InvalidSetting("window_bytes=0 leaves no room for a message: such as '8MB'")


def _check_on_missed(hook: Any, mode: Any) -> None:
    if hook is None:
        return
    if mode != "broadcast":
        raise UsageError(
            "on_missed= is for members of a broadcast group: add mode='broadcast', or leave it out; other "
            "groups go on where they stopped"
        )
    if not callable(hook):
        raise UsageError(f"on_missed={hook!r}: a function, such as on_missed=cache.clear")
    try:
        inspect.signature(hook).bind()
    except TypeError:
        raise UsageError("on_missed= is called without arguments: give a function that needs none") from None
    except ValueError:
        pass  # written in C, and says nothing of its parameters


def _whole(name: str, value: object, most: int = _MOST_AT_ONCE) -> int:
    if type(value) is int and 1 <= value <= most:
        return value
    if callable(value):
        raise UsageError("call it: @app.subscribe('orders', group='billing')")
    raise InvalidSetting(f"{name}={value!r}: a whole number from 1 to {most}", name=name)


# ---- replies ----


_MOST_CHARACTERS = 2000  # of what a requester is told
_RETRY = Backoff(1, 2, "10m")  # of messages that are no requests


def make_reply(
    function: Callable[..., Any], scope: Mapping[str, Any], *, traceback: bool, **settings: Any
) -> Subscription:
    """A subscription that answers."""
    found = make_subscription(function, scope, retry=_RETRY, ack="after", **settings)
    return replace(found, answering=_Replying(traceback))


class _Replying:
    def __init__(self, traceback: bool) -> None:
        self._traceback = traceback

    def is_over(self, message: Received) -> bool:
        """Whether its deadline has passed; then it is counted."""
        return answers_of(message).is_over(message)

    async def answered(self, message: Received, returned: Any) -> Failed | None:
        if message._asked is None:
            return None
        try:
            await answer(message, *encoded(returned))
        except Exception as error:
            if isinstance(error, PostroomError) and not error.retriable:
                return await self.failed(message, error)  # too large, or headers that are none
            return Failed(error, [message])
        return None

    async def failed(self, message: Received, error: BaseException) -> Failed:
        if message._asked is None or _comes_again(message, error):
            return Failed(error, [message])
        try:
            await fail(message, self._told(error))
        except Exception as failure:
            return Failed(failure, [message])
        return Failed(error, [message], answered=not isinstance(error, Dead))

    def _told(self, error: BaseException) -> Failure:
        text = str(error) or type(error).__name__
        if len(text) > _MOST_CHARACTERS:
            text = text[: _MOST_CHARACTERS - 1] + "…"
        return Failure(_kind(error), text, traced(error) if self._traceback else "")


def _comes_again(message: Received, error: BaseException) -> bool:
    """Whether the handler asked for another try that comes before the deadline."""
    if not isinstance(error, RetryLater):
        return False
    if error.at_ms is not None:
        return message.expires is None or error.at_ms < message.expires.timestamp() * 1000
    delay_ms = _RETRY.delay_ms(max(1, message.attempt), 1.0) if error.delay_ms is None else error.delay_ms
    return delay_ms < answers_of(message).ms_left(message)


def _kind(error: BaseException) -> str:
    if isinstance(error, RequestFailed):
        return error.kind
    if isinstance(error, PostroomError):
        return error.code
    named = {Dead: "dead", RetryLater: "retry_later", TimeoutError: "timeout"}
    return named.get(type(error), type(error).__name__)
