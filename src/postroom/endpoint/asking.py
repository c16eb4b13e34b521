"""An endpoint that passes on every operation in one way.

For what stands between whoever asks a queue and the broker: the way over the wire, the permissions of a
principal, the counting. Each says once what it does with an operation (`_ask`), and writes only those methods
for which it does something else. Every method here has its row in the table: without one this module cannot
be imported.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from .endpoint import Endpoint, OnSettled
from .operations import OPERATIONS, Operation
from .values import PollReply, PollRequest, Settle

__all__ = ["AskingEndpoint"]

P = ParamSpec("P")
R = TypeVar("R")


def _asked(
    method: Callable[Concatenate[Endpoint, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[AskingEndpoint, P], Coroutine[Any, Any, R]]:
    """The method of that name and signature, passed on."""
    operation = OPERATIONS[method.__name__]
    names = tuple(inspect.signature(method).parameters)[1:]

    def passed_on(self: AskingEndpoint, /, *args: P.args, **named: P.kwargs) -> Coroutine[Any, Any, R]:
        if len(args) > len(names):
            raise TypeError(f"{operation.name}() takes {len(names)} arguments, and {len(args)} were given")
        arguments: dict[str, Any] = dict(zip(names, args, strict=False))
        arguments.update(named)
        return self._ask(operation, arguments)

    passed_on.__name__ = operation.name
    return passed_on


class AskingEndpoint(Endpoint):
    """Passes on what it is asked; `beat` and what is no operation is left to those who inherit from it."""

    @abstractmethod
    async def _ask(self, operation: Operation, arguments: dict[str, Any]) -> Any:
        """Returns what the method returns that was called with these arguments."""

    append = _asked(Endpoint.append)
    fetch = _asked(Endpoint.fetch)
    resolve = _asked(Endpoint.resolve)
    cancel = _asked(Endpoint.cancel)
    delayed = _asked(Endpoint.delayed)
    bounds = _asked(Endpoint.bounds)

    subscribe = _asked(Endpoint.subscribe)
    unsubscribe = _asked(Endpoint.unsubscribe)
    poll = _asked(Endpoint.poll)
    settle = _asked(Endpoint.settle)
    hand_over = _asked(Endpoint.hand_over)

    async def settle_and_poll(
        self, topic: str, group: str, parts: Sequence[Settle], request: PollRequest, settled: OnSettled
    ) -> PollReply:
        """One after the other: only who has a way for both at once does it otherwise."""
        settled(await self.settle(topic, group, parts))
        return await self.poll(request)

    report_sources = _asked(Endpoint.report_sources)
    unpark = _asked(Endpoint.unpark)

    create_topic = _asked(Endpoint.create_topic)
    topics = _asked(Endpoint.topics)
    topic = _asked(Endpoint.topic)
    alter_topic = _asked(Endpoint.alter_topic)
    delete_topic = _asked(Endpoint.delete_topic)
    purge = _asked(Endpoint.purge)

    route = _asked(Endpoint.route)
    route_history = _asked(Endpoint.route_history)
    route_change = _asked(Endpoint.route_change)
    split = _asked(Endpoint.split)
    merge = _asked(Endpoint.merge)
    move = _asked(Endpoint.move)
    shards = _asked(Endpoint.shards)
    drain_shard = _asked(Endpoint.drain_shard)
    open_shard = _asked(Endpoint.open_shard)

    create_group = _asked(Endpoint.create_group)
    groups = _asked(Endpoint.groups)
    alter_group = _asked(Endpoint.alter_group)
    pause = _asked(Endpoint.pause)
    delete_group = _asked(Endpoint.delete_group)
    reset = _asked(Endpoint.reset)
    convert_group = _asked(Endpoint.convert_group)
    lag = _asked(Endpoint.lag)
    lanes = _asked(Endpoint.lanes)

    dead_letters = _asked(Endpoint.dead_letters)
    redrive = _asked(Endpoint.redrive)
    discard = _asked(Endpoint.discard)
    stopped = _asked(Endpoint.stopped)
    restart_stopped = _asked(Endpoint.restart_stopped)
    skip_stopped = _asked(Endpoint.skip_stopped)
    drop_stopped = _asked(Endpoint.drop_stopped)

    set_rate = _asked(Endpoint.set_rate)
    rates = _asked(Endpoint.rates)

    stage = _asked(Endpoint.stage)
    staged_marks = _asked(Endpoint.staged_marks)
    decide_staged = _asked(Endpoint.decide_staged)
    publish_staged = _asked(Endpoint.publish_staged)
    drop_staged = _asked(Endpoint.drop_staged)

    open_replies = _asked(Endpoint.open_replies)
    close_replies = _asked(Endpoint.close_replies)

    audit_log = _asked(Endpoint.audit_log)
    principals = _asked(Endpoint.principals)
