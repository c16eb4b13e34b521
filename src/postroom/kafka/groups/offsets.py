"""OffsetCommit, OffsetFetch and OffsetDelete: how far a group is, by topic and partition.

A commit is for the coordinator, which knows the members; what was committed can be read at any broker. They
are offsets as Kafka clients see them, and belong to the topic's id: a topic that is made anew has none.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...broker.served import Servable
from ...errors import PostroomError
from ...model.kafka_group import Phase, Who
from ...model.subscription import topics_of
from ...store.contract.kafka import KafkaOffset
from ..apis import Code, code_of
from ..topics import KafkaTopic, Topics
from .coordinator import Coordinator, RefusedError
from .membership import GroupAccess, check_name

__all__ = ["Offsets"]

_MOST_METADATA = 4096  # bytes, as Kafka has it
_NONE = {"committed_offset": -1, "committed_leader_epoch": -1, "metadata": "", "error_code": 0}


class Offsets:
    def __init__(
        self, broker: Servable, topics: Topics, coordinator: Coordinator, access: GroupAccess
    ) -> None:
        self._broker, self._topics = broker, topics
        self._coordinator, self._access = coordinator, access

    # ---- commit ----

    async def commit(self, request: Any) -> dict[str, Any]:
        who = Who(
            request.member_id,
            request.generation_id_or_member_epoch,
            getattr(request, "group_instance_id", None),
        )
        offsets: list[KafkaOffset] = []
        codes: list[list[int]] = []
        try:
            taken = await self._access.native_topics(request.group_id)
        except RefusedError as error:
            codes = [[error.code for _ in topic.partitions] for topic in request.topics]
            return {"throttle_time": 0, "topics": _answers(request.topics, codes, error.code)}
        for topic in request.topics:
            view, refused = await self._view("subscribe", topic.name)
            if not refused and topic.name in taken:
                refused = Code.INCONSISTENT_GROUP_PROTOCOL
            codes.append([refused or _checked(view, one) for one in topic.partitions])
            for one, code in zip(topic.partitions, codes[-1], strict=True):
                if view is not None and not code:
                    offsets.append(_offset(view, one))
        failed = await self._committed(request.group_id, who, offsets)
        return {"throttle_time": 0, "topics": _answers(request.topics, codes, failed)}

    async def _committed(self, group: str, who: Who, offsets: list[KafkaOffset]) -> int:
        try:
            check_name(group)
            return int(await self._coordinator.commit(group, who, offsets))
        except RefusedError as error:
            return error.code

    async def _view(self, operation: str, topic: str) -> tuple[KafkaTopic | None, int]:
        try:
            if not self._access.may(operation, topic):
                return None, Code.TOPIC_AUTHORIZATION_FAILED
            return await self._topics.view(topic), 0
        except PostroomError as error:
            return None, code_of(error)

    # ---- fetch ----

    async def fetch(self, request: Any) -> dict[str, Any]:
        groups = getattr(request, "groups", None)
        if groups is not None:
            found = [await self._fetched(one.group_id, one.topics) for one in groups]
            return {"throttle_time": 0, "groups": found}
        return {"throttle_time": 0} | await self._fetched(request.group_id, request.topics)

    async def _fetched(self, group: str, wanted: Iterable[Any] | None) -> dict[str, Any]:
        answer: dict[str, Any] = {"group_id": group, "topics": (), "error_code": 0}
        try:
            check_name(group)
            rows = await self._broker.in_thread(self._broker.store.kafka_groups.offsets, group)
        except RefusedError as error:
            return answer | {"error_code": error.code}
        except PostroomError:
            return answer | {"error_code": Code.COORDINATOR_NOT_AVAILABLE}
        known = {(one.topic_id, one.partition): one for one in rows}
        if wanted is None:
            return answer | {"topics": await self._all(rows)}
        return answer | {"topics": [await self._of_topic(known, one) for one in wanted]}

    async def _of_topic(self, known: dict[tuple[int, int], KafkaOffset], wanted: Any) -> dict[str, Any]:
        view, error = await self._view("fetch", wanted.name)
        error = 0 if error == Code.UNKNOWN_TOPIC_OR_PARTITION else error  # nothing is committed there
        found = []
        for index in wanted.partition_indexes:
            row = None if view is None else known.get((view.topic.id, index))
            found.append({"partition_index": index} | (_NONE if row is None else _shown(row)))
        if error:
            found = [one | {"error_code": error} for one in found]
        return {"name": wanted.name, "partitions": found}

    async def _all(self, rows: list[KafkaOffset]) -> list[dict[str, Any]]:
        names = {topic.id: topic.name for topic in await self._topics.all()}
        found: dict[str, list[dict[str, Any]]] = {}
        for one in rows:
            name = names.get(one.topic_id)
            if name is not None and self._access.may("fetch", name):
                found.setdefault(name, []).append({"partition_index": one.partition} | _shown(one))
        return [{"name": name, "partitions": partitions} for name, partitions in found.items()]

    # ---- delete ----

    async def delete(self, request: Any) -> dict[str, Any]:
        answer: dict[str, Any] = {"throttle_time": 0, "error_code": 0, "topics": ()}
        name = request.group_id
        try:
            check_name(name)
            if not self._coordinator.is_mine(name):
                raise RefusedError(Code.NOT_COORDINATOR)
            group = await self._broker.in_thread(self._broker.store.kafka_groups.group, name)
            if group is None:
                raise RefusedError(Code.GROUP_ID_NOT_FOUND)
            busy = self._subscribed(name)
            return answer | {"topics": [await self._deleted(name, one, busy) for one in request.topics]}
        except RefusedError as error:
            return answer | {"error_code": error.code}
        except PostroomError:
            return answer | {"error_code": Code.COORDINATOR_NOT_AVAILABLE}

    def _subscribed(self, name: str) -> frozenset[str] | None:
        """Topics whose offsets members are at work on; None: it may be any."""
        seen = self._coordinator.seen(name)
        return frozenset() if seen is None or seen[0] is Phase.EMPTY else topics_of(seen[1])

    async def _deleted(self, name: str, wanted: Any, busy: frozenset[str] | None) -> dict[str, Any]:
        view, error = await self._view("delete_group", wanted.name)
        if not error and (busy is None or wanted.name in busy):
            error = Code.GROUP_SUBSCRIBED_TO_TOPIC
        indexes = [one.partition_index for one in wanted.partitions]
        if view is not None and not error:
            in_thread, drop = self._broker.in_thread, self._broker.store.kafka_groups.drop
            await self._broker.audited(
                "delete_offsets",
                (wanted.name, name),
                lambda: in_thread(drop, name, view.topic.id, indexes),
                after=lambda _: {"partitions": len(indexes)},
            )
        partitions = [{"partition_index": index, "error_code": error} for index in indexes]
        return {"name": wanted.name, "partitions": partitions}


def _checked(view: KafkaTopic | None, wanted: Any) -> int:
    if view is None or view.chain(wanted.partition_index) is None:
        return Code.UNKNOWN_TOPIC_OR_PARTITION
    if len((wanted.committed_metadata or "").encode()) > _MOST_METADATA:
        return Code.OFFSET_METADATA_TOO_LARGE
    return Code.NONE if wanted.committed_offset >= 0 else Code.INVALID_REQUEST


def _offset(view: KafkaTopic, wanted: Any) -> KafkaOffset:
    return KafkaOffset(
        view.topic.id,
        wanted.partition_index,
        wanted.committed_offset,
        getattr(wanted, "committed_leader_epoch", -1),
        wanted.committed_metadata or "",
    )


def _answers(topics: Iterable[Any], codes: list[list[int]], failed: int) -> list[dict[str, Any]]:
    return [
        {
            "name": topic.name,
            "partitions": [
                {"partition_index": one.partition_index, "error_code": code or failed}
                for one, code in zip(topic.partitions, own, strict=True)
            ],
        }
        for topic, own in zip(topics, codes, strict=True)
    ]


def _shown(one: KafkaOffset) -> dict[str, Any]:
    return {
        "committed_offset": one.offset, "committed_leader_epoch": one.leader_epoch, "metadata": one.metadata,
        "error_code": 0,
    }  # fmt: skip
