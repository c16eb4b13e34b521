"""ListGroups, DescribeGroups and DeleteGroups: the groups of Kafka clients, for their admin clients.

Each broker lists the groups that it coordinates, so that a client that asks all of them sees each once. A
client sees the groups all of whose topics it may see.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from ...broker.served import Servable
from ...errors import PostroomError
from ...model.kafka_group import Generation, Phase, StoredMember
from ...store.contract import Group
from ...store.contract.kafka import KafkaGroup
from ..apis import Code
from ..hot import NO_OPERATIONS
from ..share.groups import ShareGroups
from .coordinator import Coordinator, RefusedError
from .membership import GroupAccess, check_name

__all__ = ["Groups"]

_DEAD = "Dead"  # of a group that is not there
_TYPE, _SHARE = "classic", "Share"
_KAFKA = {"mode": "kafka"}  # what the audit log says of such a group


class Groups:
    def __init__(
        self,
        broker: Servable,
        coordinator: Coordinator,
        access: GroupAccess,
        shared: ShareGroups,
        states: Callable[[Mapping[str, Iterable[Group]]], Awaitable[dict[str, str]]],
    ) -> None:
        self._broker, self._coordinator, self._access = broker, coordinator, access
        self._shared, self._shared_states = shared, states

    async def listed(self, request: Any) -> dict[str, Any]:
        states = {one.lower() for one in getattr(request, "states_filter", None) or ()}
        types = {one.lower() for one in getattr(request, "types_filter", None) or ()}
        answer: dict[str, Any] = {"throttle_time": 0, "error_code": 0, "groups": ()}
        try:
            permitted = await self._access.permitted("groups", await self._groups())
            shares = await self._share_groups() if not types or _SHARE.lower() in types else []
        except RefusedError as error:
            return answer | {"error_code": error.code}
        except PostroomError:
            return answer | {"error_code": Code.COORDINATOR_NOT_AVAILABLE}
        found = [self._shown(one) for one in permitted] + shares
        shown = [
            one
            for one in found
            if (not states or one["group_state"].lower() in states)
            and (not types or one["group_type"].lower() in types)
        ]
        return answer | {"groups": shown}

    async def _groups(self) -> list[KafkaGroup]:
        groups = await self._broker.in_thread(self._broker.store.kafka_groups.groups)
        return [one for one in groups if self._coordinator.is_mine(one.name)]

    async def _share_groups(self) -> list[dict[str, Any]]:
        """Groups in mode "shared": to Kafka clients they are share groups."""
        mine = {
            name: groups
            for name, groups in (await self._shared.all()).items()
            if self._coordinator.is_mine(name)
            and all(self._access.may("groups", one.topic) for one in groups)
        }
        return [
            {"group_id": name, "protocol_type": "share", "group_state": state, "group_type": _SHARE}
            for name, state in (await self._shared_states(mine)).items()
        ]

    def _shown(self, group: KafkaGroup) -> dict[str, Any]:
        phase, generation = self._seen(group)
        return {
            "group_id": group.name, "protocol_type": generation.protocol_type, "group_state": str(phase),
            "group_type": _TYPE,
        }  # fmt: skip

    def _seen(self, group: KafkaGroup) -> tuple[Phase, Generation]:
        seen = self._coordinator.seen(group.name)
        if seen is not None:
            return seen
        live = group.is_live(self._broker.store.now_ms())
        return (Phase.STABLE if live else Phase.EMPTY), group.generation

    async def describe(self, request: Any) -> dict[str, Any]:
        found = [await self._described(name) for name in request.groups]
        return {"throttle_time": 0, "groups": found}

    async def _described(self, name: str) -> dict[str, Any]:
        answer = {
            "error_code": 0, "group_id": name, "group_state": "", "protocol_type": "", "protocol_data": "",
            "members": (), "authorized_operations": NO_OPERATIONS,
        }  # fmt: skip
        try:
            check_name(name)
            if not self._coordinator.is_mine(name):
                raise RefusedError(Code.NOT_COORDINATOR)
            await self._access.check("groups", name)
            group = await self._broker.in_thread(self._broker.store.kafka_groups.group, name)
        except RefusedError as error:
            return answer | {"error_code": error.code}
        except PostroomError:
            return answer | {"error_code": Code.COORDINATOR_NOT_AVAILABLE}
        if group is None:
            return answer | {"group_state": _DEAD}
        phase, generation = self._seen(group)
        return answer | {
            "group_state": str(phase), "protocol_type": generation.protocol_type,
            "protocol_data": generation.protocol if phase is not Phase.EMPTY else "",
            "members": [] if phase is Phase.EMPTY else [
                _member(one, generation.protocol) for one in generation.members
            ],
        }  # fmt: skip

    async def delete(self, request: Any) -> dict[str, Any]:
        found = [{"group_id": name, "error_code": await self._deleted(name)} for name in request.groups_names]
        return {"throttle_time": 0, "results": found}

    async def _deleted(self, name: str) -> int:
        try:
            check_name(name)
            if not self._coordinator.is_mine(name):
                return Code.NOT_COORDINATOR
            await self._access.check("delete_group", name)
            if await self._broker.in_thread(self._broker.store.kafka_groups.group, name) is None:
                return await self._shared.delete(name)
            forgotten = await self._broker.audited(
                "delete_group",
                ("", name),
                lambda: self._coordinator.forget(name),
                before=_KAFKA,
                after=lambda done: None if done else _KAFKA,
                lasting=True,
            )
            return Code.NONE if forgotten else Code.NON_EMPTY_GROUP
        except RefusedError as error:
            return error.code
        except PostroomError:
            return Code.COORDINATOR_NOT_AVAILABLE


def _member(one: StoredMember, protocol: str) -> dict[str, Any]:
    return {
        "member_id": one.id, "group_instance_id": one.instance, "client_id": one.client,
        "client_host": one.host, "member_metadata": dict(one.protocols).get(protocol, b""),
        "member_assignment": one.assignment,
    }  # fmt: skip
