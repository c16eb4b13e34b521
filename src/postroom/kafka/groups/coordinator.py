"""The groups that this broker coordinates, in memory, from their last generation in the store on.

Which broker coordinates a group is decided by rendezvous over the brokers that live; its lease on the row of
the group keeps a second one out that knows other brokers. Whatever a group becomes is written before anybody
is told (`_settle`), and the store refuses what a broker without the lease writes or commits (I28). So this
may be killed, or stand still, at any moment: clients are told to look for the coordinator again, and the next
one goes on from the row.

Keeps no truth. Must never answer a join or a sync whose generation was not written.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, TypeVar

from ...broker.served import Servable
from ...config import WireTuning
from ...errors import PostroomError
from ...model.kafka_group import (
    Assigned,
    ClassicGroup,
    Generation,
    GroupError,
    Joined,
    Joining,
    Phase,
    Rules,
    Who,
)
from ...store.contract.kafka import KafkaOffset
from ..apis import Code
from ..hot import Node

__all__ = ["Coordinator", "RefusedError", "coordinator_of"]

_log = logging.getLogger("postroom.kafka")

_MOST = 20_000  # groups in memory

T = TypeVar("T")


class RefusedError(Exception):
    """The request is answered with this code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def coordinator_of(nodes: Sequence[Node], group: str) -> Node:
    """The node that coordinates a group: the same for all who know the same nodes.

    >>> coordinator_of([Node(7, "a", 1)], "billing").id
    7
    """
    name = group.encode()
    return max(nodes, key=lambda node: blake2b(b"%d/" % node.id + name, digest_size=8).digest())


@dataclass(slots=True, eq=False)
class _Coordinated:
    name: str
    state: ClassicGroup
    lease_until: int
    taken_at: int
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)  # one change at a time, until it is written
    timer: asyncio.TimerHandle | None = None
    used: bool = True  # since it was last looked whether it is idle


class Coordinator:
    """`id`: of this broker in leases. `nodes`: all that live; `me`: the number of this one."""

    def __init__(
        self,
        broker: Servable,
        id: str,
        nodes: Callable[[], Sequence[Node]],
        me: Callable[[], int],
        tuning: WireTuning,
    ) -> None:
        self._broker, self._id, self._nodes, self._me = broker, id, nodes, me
        self._lease_ms = tuning.entered_ms
        self.sessions_ms = range(tuning.kafka_shortest_session_ms, tuning.kafka_longest_session_ms + 1)
        self._rules = Rules(tuning.kafka_first_members_ms)
        self._loop = asyncio.get_running_loop()
        self._groups: dict[str, _Coordinated] = {}
        self._loading: dict[str, asyncio.Task[_Coordinated | None]] = {}
        self._tickets = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    def node_of(self, name: str) -> Node:
        """The node that coordinates this group."""
        return coordinator_of(self._nodes(), name)

    def is_mine(self, name: str) -> bool:
        return self.node_of(name).id == self._me()

    def _now(self) -> int:
        return int(self._loop.time() * 1000)

    # ---- what members ask ----

    async def join(self, name: str, asked: Joining, new_id: str) -> Joined:
        found: Joined = await self._answered(
            name, lambda ticket, group, now: group.join(ticket, asked, new_id, now), make=True
        )
        return found

    async def sync(self, name: str, who: Who, assignments: dict[str, bytes], **said: str | None) -> Assigned:
        found: Assigned = await self._answered(
            name, lambda ticket, group, now: group.sync(ticket, who, assignments, now, **said)
        )
        return found

    async def beat(self, name: str, who: Who) -> GroupError:
        group = await self._group(name)
        if group is None:
            return GroupError.UNKNOWN_MEMBER
        error = group.state.beat(who, self._now())
        self._arm(group)
        return error

    async def leave(self, name: str, each: Sequence[Who]) -> list[GroupError]:
        group = await self._group(name)
        if group is None:
            return [GroupError.UNKNOWN_MEMBER for _ in each]
        return await self._change(group, lambda state, now: [state.leave(who, now) for who in each])

    async def commit(self, name: str, who: Who, offsets: Sequence[KafkaOffset]) -> GroupError:
        """Offsets are committed if the group, in memory and in the store, has this member."""
        group = await self._group(name, make=not who.member and who.generation < 0)
        if group is None:
            return GroupError.UNKNOWN_MEMBER if who.generation < 0 else GroupError.ILLEGAL_GENERATION
        error = group.state.check_commit(who, self._now())
        self._arm(group)
        if error or not offsets:
            return error
        error = await self._stored(self._broker.store.kafka_groups.commit, name, self._id, who, offsets)
        if error is GroupError.NOT_COORDINATOR:
            self._drop(group)
        return error

    async def _answered(
        self, name: str, act: Callable[[int, ClassicGroup, int], None], *, make: bool = False
    ) -> Any:
        """What is said to the ticket under which a request waits."""
        group = await self._group(name, make=make)
        if group is None:
            raise RefusedError(GroupError.UNKNOWN_MEMBER)
        ticket = next(self._tickets)
        answer = self._answers[ticket] = self._loop.create_future()
        try:
            await self._change(
                group, lambda state, now: act(ticket, state, now) if ticket in self._answers else None
            )
            return await answer
        except asyncio.CancelledError:  # the client has hung up
            group.state.gone(ticket, self._now())
            self._arm(group)
            raise
        finally:
            del self._answers[ticket]

    # ---- a group in memory ----

    async def _group(self, name: str, *, make: bool = False) -> _Coordinated | None:
        """The group, if this broker coordinates it; None: there is none. RefusedError: another one does."""
        if not self.is_mine(name):
            raise RefusedError(GroupError.NOT_COORDINATOR)
        group = self._groups.get(name)
        if group is None:
            group = await self._loaded(name, make)
        if group is not None:
            group.used = True
            if self._now() >= group.lease_until:  # the store was away, or this process stood still
                self._drop(group)
                raise RefusedError(GroupError.NOT_COORDINATOR)
        return group

    async def _loaded(self, name: str, make: bool) -> _Coordinated | None:
        task = self._loading.get(name)
        if task is None or (make and not task.done()):
            if len(self._groups) + len(self._loading) >= _MOST:
                raise RefusedError(Code.COORDINATOR_NOT_AVAILABLE)
            task = self._loop.create_task(self._load(name, make))
            self._loading[name] = task
            task.add_done_callback(lambda done: self._finished(name, done))
        return await asyncio.shield(task)

    def _finished(self, name: str, task: asyncio.Task[Any]) -> None:
        if self._loading.get(name) is task:
            del self._loading[name]
        if not task.cancelled():
            task.exception()  # whoever waits has it

    async def _load(self, name: str, make: bool) -> _Coordinated | None:
        asked_at = self._now()
        take = self._broker.store.kafka_groups.take
        found = await self._stored(lambda: take(name, self._id, self._lease_ms, make=make))
        known = self._groups.get(name)
        if known is not None or found is None:
            return known
        if found.holder != self._id:
            raise RefusedError(GroupError.NOT_COORDINATOR)
        state = ClassicGroup(found.generation, self._now(), self._rules)
        group = _Coordinated(name, state, asked_at + self._lease_ms, self._now())
        self._groups[name] = group
        self._arm(group)
        return group

    async def _stored(self, verb: Callable[..., T], *args: Any) -> T:
        """What the store says; while it cannot be asked there is no coordinator."""
        try:
            found: T = await self._broker.in_thread(verb, *args)
            return found
        except PostroomError as error:
            _log.warning("a group of Kafka clients waits for the store: %s", error)
            raise RefusedError(Code.COORDINATOR_NOT_AVAILABLE) from error

    async def _change(self, group: _Coordinated, act: Callable[[ClassicGroup, int], T]) -> T:
        """Change a group, in a task of its own: a client that hangs up does not end it halfway."""
        return await asyncio.shield(self._task(self._changed(group, act)))

    def _task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _changed(self, group: _Coordinated, act: Callable[[ClassicGroup, int], T]) -> T:
        async with group.changing:
            if self._groups.get(group.name) is not group:
                raise RefusedError(GroupError.NOT_COORDINATOR)
            found = act(group.state, self._now())
            await self._settle(group)
        return found

    async def _settle(self, group: _Coordinated) -> None:
        """Write the group down if it has become another; then its answers may leave."""
        state = group.state
        if state.is_unwritten:
            state.is_unwritten = False
            leaving, state.replies = state.replies, []
            write = self._broker.store.kafka_groups.write
            try:
                ok = await self._stored(write, group.name, self._id, state.generation)
                error = GroupError.NONE if ok else GroupError.NOT_COORDINATOR
            except RefusedError:  # its fate is not known: it is read again
                error = GroupError.NOT_COORDINATOR
            if error:
                leaving = [(ticket, _failed(reply, error)) for ticket, reply in leaving]
                self._drop(group)
            self._say(leaving)
        self._deliver(state)
        self._arm(group)

    def _deliver(self, state: ClassicGroup) -> None:
        leaving, state.replies = state.replies, []
        self._say(leaving)

    def _say(self, replies: Sequence[tuple[int, Joined | Assigned]]) -> None:
        for ticket, reply in replies:
            answer = self._answers.get(ticket)
            if answer is not None and not answer.done():
                answer.set_result(reply)

    def _drop(self, group: _Coordinated) -> None:
        """Forget what is in memory, and tell those who wait that somebody else coordinates."""
        if self._groups.get(group.name) is group:
            del self._groups[group.name]
        if group.timer is not None:
            group.timer.cancel()
        group.state.give_up()
        self._deliver(group.state)

    def _arm(self, group: _Coordinated) -> None:
        """Wake up when time changes something."""
        if group.timer is not None:
            group.timer.cancel()
            group.timer = None
        due = group.state.due()
        if due is not None and self._groups.get(group.name) is group:
            group.timer = self._loop.call_at(due / 1000 + 0.001, self._ring, group)

    def _ring(self, group: _Coordinated) -> None:
        self._task(self._ticked(group))

    async def _ticked(self, group: _Coordinated) -> None:
        try:
            await self._changed(group, lambda state, now: state.tick(now))
        except RefusedError:
            pass  # it is another's by now

    # ---- leases ----

    async def keep(self) -> None:
        """Renew the leases, and let go of what is idle or another broker's; called every few seconds."""
        if not self._groups:
            return
        asked_at = self._now()
        groups = self._broker.store.kafka_groups
        mine = await self._broker.in_thread(groups.renew, self._id, self._lease_ms)
        leaving = set()
        for name, group in list(self._groups.items()):
            if name in mine:
                group.lease_until = asked_at + self._lease_ms
            elif group.taken_at < asked_at:
                self._drop(group)
            if not self.is_mine(name) or (group.state.is_idle and not group.used):
                leaving.add(name)
                self._drop(group)
            group.used = False
        if leaving:
            await self._broker.in_thread(groups.release, self._id, leaving)

    async def stop(self) -> None:
        """Let others coordinate all of it, now."""
        for group in list(self._groups.values()):
            self._drop(group)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            await self._broker.in_thread(self._broker.store.kafka_groups.release, self._id)
        except PostroomError as error:
            _log.warning("leases on groups of Kafka clients are left to run out: %s", error)

    # ---- what admin clients ask ----

    def seen(self, name: str) -> tuple[Phase, Generation] | None:
        """A group as it is in memory; None: it is not there."""
        group = self._groups.get(name)
        return None if group is None else (group.state.phase, group.state.generation)

    async def forget(self, name: str) -> bool:
        """Delete a group, if nobody is in it."""
        group = self._groups.get(name)
        if group is not None:
            if group.state.phase is not Phase.EMPTY:
                return False
            self._drop(group)
        return await self._stored(self._broker.store.kafka_groups.drop, name)


def _failed(reply: Joined | Assigned, error: GroupError) -> Joined | Assigned:
    """The same, but nothing came of it."""
    return Joined(error, reply.member) if isinstance(reply, Joined) else Assigned(error)
