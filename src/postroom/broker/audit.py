"""Every administrative operation leaves its entry in the audit log, whichever door it came through.

This is the one place that writes them. The table says which operations are administrative (`changes`), and
what of the queue each changes; the methods of a broker for these are wrapped here, so that neither a door nor
an operation can forget it. An entry is begun before the operation and completed after it (`model.audit`): if
it cannot be begun nothing is done, and if it cannot be completed it says that its end is not known.

Must never change an answer or an error, and costs the way of a message nothing: whatever sends, polls and
settles is not administrative.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any

from ..config import Limits
from ..endpoint.asker import asker
from ..endpoint.operations import OPERATIONS, Changed, Operation
from ..endpoint.values import PrincipalInfo, ResetPlan
from ..errors import PostroomError, UnknownGroup, UnknownTopic
from ..model.audit import (
    DONE,
    AuditEntry,
    State,
    differing,
    rate_state,
    route_state,
    settings_state,
    told_arguments,
)
from ..model.policy.settings import GroupSettings, TopicSettings
from ..store.contract import Store
from .access import InThread

__all__ = ["AuditVerbs", "ForgetAudit"]

_log = logging.getLogger("postroom.broker")

_MOST_LISTED = 1000
_LASTING: tuple[Changed, ...] = ("topic", "group", "route", "shard", "rate")
# what stays as it is unless it is changed: if it is the same afterwards, nothing was done


_USUAL: Mapping[str, State] = {
    "topic": settings_state(TopicSettings()),
    "group": settings_state(GroupSettings(), paused=False),
}


@dataclass(frozen=True, slots=True)
class _Subject:
    """What an operation is about."""

    topic: str
    group: str  # or a shard, or a producer
    rate: str = ""


class AuditVerbs:
    """The part of a broker that keeps the audit log: it wraps the operations of whoever inherits from it."""

    store: Store
    _in_thread: InThread
    _limits: Limits

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for operation in OPERATIONS.values():
            method = getattr(cls, operation.name, None)  # its own, or that of a part
            if operation.changes is not None and method is not None and not hasattr(method, "__wrapped__"):
                setattr(cls, operation.name, _audited(operation, method))

    async def audit_log(
        self, limit: int, topic: str = "", who: str = "", since: int = 0, before: int = 0, after: int = 0
    ) -> list[AuditEntry]:
        def read() -> list[AuditEntry]:
            wanted = {"topic": topic, "who": who, "since": since, "before": before, "after": after}
            return self.store.audit.entries(limit=min(limit, _MOST_LISTED), **wanted)  # type: ignore[arg-type]

        return await self._in_thread(read)

    async def principals(self) -> list[PrincipalInfo]:
        """Everybody who may use served brokers, and for what; of a secret, only whether there is one."""
        found = await self._in_thread(self.store.access.principals)
        return [
            PrincipalInfo(one.name, tuple(map(str, one.permissions)), one.created_at, bool(one.secret_hash))
            for one in found
        ]

    async def audited(
        self,
        action: str,
        subject: tuple[str, str],
        work: Callable[[], Awaitable[Any]],
        *,
        asked: State | None = None,
        before: State | None = None,
        after: Callable[[Any], State | None] = lambda result: None,
        usual: State | None = None,
        lasting: bool = False,
    ) -> Any:
        """Do an administrative action, and have its entry. `subject`: a topic, and a group or the like.

        `after`: what its answer says of what was changed. `usual`: what need not be told of
        something that is made or deleted. `lasting`: the entry goes if what there is is as `before`.
        """
        audit, most = self.store.audit, self._limits.audit_entries
        id = await self._in_thread(audit.begin, asker(), action, *subject, asked or {}, before, most)
        try:
            result = await work()
        except PostroomError as error:
            await self._complete(id, error.code, before, None)
            raise
        was, became = differing(before, after(result), usual)
        if lasting and was == became:
            await self._quietly(audit.drop, id)
        else:
            await self._complete(id, DONE, was, became)
        return result

    async def _complete(self, id: int, outcome: str, before: State | None, after: State | None) -> None:
        await self._quietly(self.store.audit.end, id, outcome, before, after)

    async def _quietly(self, verb: Callable[..., None], *args: Any) -> None:
        """What was done was done: the answer does not depend on it."""
        try:
            await self._in_thread(verb, *args)
        except PostroomError as error:
            _log.warning("an entry of the audit log is not completed, and says so: %s", error)

    def _before(self, changes: Changed, subject: _Subject) -> State | None:
        """Returns what it is like now; None: it is not there, or there is nothing to tell."""
        catalog = self.store.catalog
        try:
            if changes == "topic":
                topic = catalog.topic(subject.topic)
                return settings_state(topic.settings, partitions=len(topic.route.ranges))
            if changes == "group":
                group = catalog.group(subject.topic, subject.group)
                return settings_state(group.settings, paused=group.paused)
            if changes == "route":
                return route_state(catalog.topic(subject.topic).route)
        except (UnknownTopic, UnknownGroup):
            return None
        if changes == "rate":
            return rate_state(self.store.rates.all(), subject.rate)
        if changes == "shard":
            states = {one.name or "first": one.state for one in self.store.shards()}
            return {"state": states[subject.group]} if subject.group in states else None
        return None


def _audited(operation: Operation, method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """The method, with its entry. Its arguments are the fields of the request, in their order."""
    names = operation.request.__struct_fields__
    changes = operation.changes
    assert changes is not None, "only what is administrative is wrapped"

    @wraps(method)
    async def acting(self: AuditVerbs, *args: Any, **named: Any) -> Any:
        arguments = dict(zip(names, args, strict=False)) | named
        if arguments.get("dry_run"):
            return await method(self, *args, **named)
        subject = _subject(operation, arguments)
        before = await self._in_thread(self._before, changes, subject)
        if before is not None and arguments.get("exist_ok"):  # it is there, and stays as it is
            return await method(self, *args, **named)
        return await self.audited(
            operation.name,
            (subject.topic, subject.group),
            lambda: method(self, *args, **named),
            asked=told_arguments(arguments),
            before=before,
            after=lambda result: _after(changes, arguments, result),
            usual=_USUAL.get(changes),
            lasting=changes in _LASTING,
        )

    return acting


def _subject(operation: Operation, arguments: Mapping[str, Any]) -> _Subject:
    if operation.changes == "rate":
        topic, group, producer = arguments["rate"].subject
        return _Subject(topic, group or producer, arguments["rate"].name)
    if operation.changes == "shard":
        return _Subject("", arguments["name"])
    if "topic" not in arguments:
        return _Subject(arguments["name"], "")
    return _Subject(arguments["topic"], arguments.get("group") or arguments.get("name") or "")


def _after(changes: Changed, arguments: Mapping[str, Any], result: Any) -> State | None:
    """Returns what it is like by the operation's answer; None: it is not there any more."""
    if changes == "rate":
        return rate_state([arguments["rate"]], arguments["rate"].name)
    if result is None:
        return None
    if changes == "topic":
        return settings_state(result.settings, partitions=result.partitions)
    if changes == "group":
        return settings_state(result.settings, paused=result.paused)
    if changes == "route":
        return route_state(result)
    if changes == "shard":
        return {"state": result.state}
    return _moved(result) if isinstance(result, ResetPlan) else {"messages": result}


def _moved(plan: ResetPlan) -> State:
    moves = {
        f"partition {one.partition} of {one.group}": f"{one.before} to {one.after}" for one in plan.partitions
    }
    return {"again": plan.again, "skipped": plan.skipped, **moves}


class ForgetAudit:
    """Forget entries of the audit log that are too old, or too many."""

    name: str = "forget-audit"
    every_s: float = 3600

    def __init__(self, store: Store, limits: Limits, now_ms: Callable[[], int]) -> None:
        self._store, self._limits, self._now_ms = store, limits, now_ms

    def run_once(self) -> None:
        limits = self._limits
        self._store.audit.trim(self._now_ms() - limits.audit_ms, limits.audit_entries)
