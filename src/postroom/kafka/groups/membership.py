"""FindCoordinator, JoinGroup, SyncGroup, Heartbeat and LeaveGroup: how members come, stay and go.

A request is bounded before it reaches the group (I22). Whoever joins may consume every topic that the group
is about, and those that it subscribes to: nobody takes partitions from members that it has no business with.
A name that a native group of such a topic has is not for Kafka clients (INCONSISTENT_GROUP_PROTOCOL).
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ...broker.served import Servable
from ...errors import PermissionDenied, PostroomError
from ...model.kafka_group import Generation, Joining, Protocols, Who
from ...model.subscription import topics_of, topics_wanted
from ...store.contract.kafka import KafkaGroup
from ..apis import Code
from .coordinator import Coordinator, RefusedError

__all__ = ["GroupAccess", "Membership", "check_name"]

T = TypeVar("T")

_log = logging.getLogger("postroom.kafka")

_LONGEST_NAME = 249
_MOST_PROTOCOLS = 64
_LONGEST_CLIENT = 100
_GROUP, _TRANSACTION, _SHARE = 0, 1, 2  # what a coordinator is looked for
_NEEDS_ID_FROM, _SKIPS_FROM = 4, 9  # versions of JoinGroup


def check_name(name: str) -> None:
    """RefusedError for what is no name of a group."""
    if not 0 < len(name) <= _LONGEST_NAME:
        raise RefusedError(Code.INVALID_GROUP_ID)


class GroupAccess:
    """Who may use which group, and which names are taken by native groups. `permit`: operation and topic."""

    def __init__(
        self, broker: Servable, coordinator: Coordinator, permit: Callable[[str, str | None], None]
    ) -> None:
        self._broker, self._coordinator, self._permit = broker, coordinator, permit

    def may(self, operation: str, topic: str | None) -> bool:
        try:
            self._permit(operation, topic)
        except PermissionDenied:
            return False
        return True

    async def check(self, operation: str, name: str) -> None:
        """RefusedError unless the client may do so to every topic that the group is about."""
        topics = await self._topics(name)
        if not all(self.may(operation, topic) for topic in (topics if topics is not None else (None,))):
            raise RefusedError(Code.GROUP_AUTHORIZATION_FAILED)

    async def check_join(self, name: str, protocol_type: str, protocols: Protocols) -> None:
        """RefusedError if the client may not join, or another kind of group has the name."""
        await self.check("subscribe", name)
        wanted = topics_wanted(protocol_type, protocols)
        if not all(self.may("subscribe", topic) for topic in (wanted if wanted is not None else (None,))):
            raise RefusedError(Code.GROUP_AUTHORIZATION_FAILED)
        if await self.native_topics(name) & (wanted or frozenset()):
            raise RefusedError(Code.INCONSISTENT_GROUP_PROTOCOL)

    async def native_topics(self, name: str) -> set[str]:
        """The topics that have a native group of that name."""
        return (await self._read(self._broker.listing.look)).with_group.get(name, set())

    async def permitted(self, operation: str, groups: Sequence[KafkaGroup]) -> list[KafkaGroup]:
        """Those of these groups all of whose topics the client may do so to: three reads for all of them."""
        seen = {group.name: self._coordinator.seen(group.name) for group in groups}

        def read() -> list[frozenset[str] | None]:
            names = {topic.id: topic.name for topic in self._broker.listing.look().topics}
            committed = self._broker.store.kafka_groups.topics()
            found: list[frozenset[str] | None] = []
            for group in groups:
                now = seen[group.name]
                wanted = topics_of(group.generation if now is None else now[1])
                ids = committed.get(group.name, ())
                found.append(None if wanted is None else wanted | {names[id] for id in ids if id in names})
            return found

        of_groups = await self._read(read)
        asked = {topic for topics in of_groups for topic in (topics if topics is not None else (None,))}
        may = {topic for topic in asked if self.may(operation, topic)}
        each = zip(groups, of_groups, strict=True)
        return [one for one, topics in each if may.issuperset(topics if topics is not None else (None,))]

    async def _topics(self, name: str) -> frozenset[str] | None:
        """What the group has committed or subscribes to; None: it cannot be told."""
        groups = self._broker.store.kafka_groups

        def read() -> tuple[set[int], Generation]:
            found = groups.group(name)
            committed = {one.topic_id for one in groups.offsets(name)} if found else set()
            return committed, found.generation if found else Generation()

        ids, generation = await self._read(read)
        seen = self._coordinator.seen(name)
        wanted = topics_of(generation if seen is None else seen[1])
        if wanted is None:
            return None
        listed = await self._read(self._broker.listing.look)
        return wanted | {topic.name for topic in listed.topics if topic.id in ids}

    async def _read(self, verb: Callable[[], T]) -> T:
        try:
            found: T = await self._broker.in_thread(verb)
            return found
        except PostroomError as error:
            _log.warning("the group of a Kafka client cannot be read now: %s", error)
            raise RefusedError(Code.COORDINATOR_NOT_AVAILABLE) from error


class Membership:
    """The requests of one connection. `host`: where the client is."""

    def __init__(self, coordinator: Coordinator, access: GroupAccess, host: Callable[[], str]) -> None:
        self._coordinator, self._access, self._host = coordinator, access, host

    async def find_coordinator(self, request: Any) -> dict[str, Any]:
        kind = getattr(request, "key_type", _GROUP)
        keys = getattr(request, "coordinator_keys", None)
        found = [self._found(kind, key) for key in ((request.key,) if keys is None else keys)]
        return {"throttle_time": 0, "coordinators": found} | (found[0] if keys is None else {})

    def _found(self, kind: int, key: str) -> dict[str, Any]:
        if kind not in (_GROUP, _TRANSACTION, _SHARE):
            code = Code.INVALID_REQUEST
            return {
                "key": key, "node_id": -1, "host": "", "port": -1, "error_code": code,
                "error_message": "there are coordinators of groups here, and of nothing else",
            }  # fmt: skip
        node = self._coordinator.node_of(key)
        return {
            "key": key, "node_id": node.id, "host": node.host, "port": node.port, "error_code": 0,
            "error_message": None,
        }  # fmt: skip

    async def join(self, version: int, client: str, request: Any) -> dict[str, Any]:
        answer: dict[str, Any] = {
            "throttle_time": 0, "error_code": 0, "generation_id": -1, "protocol_type": None,
            "protocol_name": "", "leader": "", "skip_assignment": False, "member_id": request.member_id,
            "members": (),
        }  # fmt: skip
        try:
            asked = self._joining(version, client, request)
            check_name(request.group_id)
            await self._access.check_join(request.group_id, asked.protocol_type, asked.protocols)
            new_id = f"{asked.instance or asked.client or 'member'}-{uuid.uuid4()}"
            found = await self._coordinator.join(request.group_id, asked, new_id)
        except RefusedError as error:
            return answer | {"error_code": error.code}
        members = [
            {"member_id": id, "group_instance_id": instance, "metadata": metadata}
            for id, instance, metadata in found.members
        ]
        return answer | {
            "error_code": int(found.error), "generation_id": found.generation, "leader": found.leader,
            "protocol_type": found.protocol_type or None, "protocol_name": found.protocol,
            "skip_assignment": found.skip_assignment, "member_id": found.member, "members": members,
        }  # fmt: skip

    def _joining(self, version: int, client: str, request: Any) -> Joining:
        session_ms = request.session_timeout
        if session_ms not in self._coordinator.sessions_ms:
            raise RefusedError(Code.INVALID_SESSION_TIMEOUT)
        names = [one.name for one in request.protocols]
        instance = getattr(request, "group_instance_id", None)
        longest = max(map(len, (request.protocol_type, instance or "", request.member_id, *names)))
        if len(names) > _MOST_PROTOCOLS or len({*names}) < len(names) or longest > 2 * _LONGEST_NAME:
            raise RefusedError(Code.INVALID_REQUEST)
        rebalance_ms = getattr(request, "rebalance_timeout", -1)
        return Joining(
            request.member_id, instance, client[:_LONGEST_CLIENT], self._host(), session_ms,
            rebalance_ms if rebalance_ms > 0 else session_ms, request.protocol_type,
            tuple((one.name, one.metadata) for one in request.protocols),
            needs_id=version >= _NEEDS_ID_FROM, skips=version >= _SKIPS_FROM,
        )  # fmt: skip

    async def sync(self, request: Any) -> dict[str, Any]:
        answer = {
            "throttle_time": 0, "error_code": 0, "protocol_type": None, "protocol_name": None,
            "assignment": b"",
        }  # fmt: skip
        assignments = {one.member_id: one.assignment for one in request.assignments}
        said = {
            "protocol_type": getattr(request, "protocol_type", None),
            "protocol": getattr(request, "protocol_name", None),
        }
        try:
            check_name(request.group_id)
            found = await self._coordinator.sync(request.group_id, _who(request), assignments, **said)
        except RefusedError as error:
            return answer | {"error_code": error.code}
        return answer | {
            "error_code": int(found.error), "protocol_type": found.protocol_type or None,
            "protocol_name": found.protocol or None, "assignment": found.assignment,
        }  # fmt: skip

    async def heartbeat(self, request: Any) -> dict[str, Any]:
        try:
            check_name(request.group_id)
            code = int(await self._coordinator.beat(request.group_id, _who(request)))
        except RefusedError as error:
            code = error.code
        return {"throttle_time": 0, "error_code": code}

    async def leave(self, request: Any) -> dict[str, Any]:
        """Whoever names a static member by its instance alone may be somebody else: it has to be allowed."""
        members = getattr(request, "members", None)
        each = [Who(request.member_id)] if members is None else [_leaving(one) for one in members]
        answer: dict[str, Any] = {"throttle_time": 0, "error_code": 0, "members": ()}
        try:
            check_name(request.group_id)
            if any(not who.member for who in each):
                await self._access.check("subscribe", request.group_id)
            errors = await self._coordinator.leave(request.group_id, each)
        except RefusedError as error:
            return answer | {"error_code": error.code}
        if members is None:
            return answer | {"error_code": int(errors[0])}
        left = [
            {"member_id": who.member, "group_instance_id": who.instance, "error_code": int(error)}
            for who, error in zip(each, errors, strict=True)
        ]
        return answer | {"members": left}


def _who(request: Any) -> Who:
    return Who(request.member_id, request.generation_id, getattr(request, "group_instance_id", None))


def _leaving(member: Any) -> Who:
    return Who(member.member_id, instance=member.group_instance_id)
