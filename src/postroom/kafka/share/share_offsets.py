"""DescribeShareGroupOffsets, AlterShareGroupOffsets and DeleteShareGroupOffsets: how far a share group is.

The start offset of a partition is the lowest that is not settled. To alter it is to reset the group there,
or to make it begin there; to delete it is to delete the group of that topic. Both need that nobody is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ...broker.served import Servable
from ...endpoint.values import PartitionLag
from ...errors import GroupLive, InvalidSetting, PostroomError, UnknownGroup, UnknownPartition
from ...model.policy.settings import GroupWish, Start
from ...model.topology.chain import Chain
from ...model.topology.names import share_group
from ..apis import Code, code_of
from ..topics import KafkaTopic, Topics
from .fetching import check_group
from .groups import ShareGroups
from .sessions import ShareError

__all__ = ["ShareOffsets"]

_NO_OFFSET = -1


class ShareOffsets:
    """The requests of one connection. `permit`: operation and topic; PermissionDenied."""

    def __init__(
        self, broker: Servable, topics: Topics, groups: ShareGroups, permit: Callable[[str, str], None]
    ) -> None:
        self._broker, self._topics, self._groups, self._permit = broker, topics, groups, permit

    # ---- describe ----

    async def describe(self, request: Any) -> dict[str, Any]:
        return {"throttle_time": 0, "groups": [await self._described(one) for one in request.groups]}

    async def _described(self, wanted: Any) -> dict[str, Any]:
        answer: dict[str, Any] = {
            "group_id": wanted.group_id,
            "topics": [],
            "error_code": 0,
            "error_message": None,
        }
        try:
            groups = await self._groups.of(check_group(wanted.group_id))
            there = {group.topic for group in groups}
            if not there:
                raise ShareError(Code.GROUP_ID_NOT_FOUND, f"there is no share group {wanted.group_id!r}")
            if not wanted.topics:
                self._groups.check("lag", groups)
            asked = [(one.topic_name, one.partitions) for one in wanted.topics or ()]
            asked = asked or [(topic, None) for topic in sorted(there)]
            answer["topics"] = [
                await self._topic(share_group(wanted.group_id), topic, indexes, topic in there)
                for topic, indexes in asked
            ]
        except ShareError as error:
            return answer | {"error_code": error.code, "error_message": error.message}
        except PostroomError as error:
            return answer | {"error_code": code_of(error), "error_message": str(error)}
        return answer

    async def _topic(
        self, group: str, topic: str, indexes: Sequence[int] | None, there: bool
    ) -> dict[str, Any]:
        try:
            self._permit("lag", topic)
            view = await self._topics.view(topic)
            lags = (await self._broker.lag(topic, group)).partitions if there else ()
        except PostroomError as error:
            partitions = [_partition(index, error=error) for index in indexes or ()]
            return {"topic_name": topic, "topic_id": None, "partitions": partitions}
        if indexes is None:
            indexes = [chain.index for chain in view.chains if chain.links]
        own = {one.partition: one for one in lags if one.topic == topic}
        partitions = [_told(view.chain(index), index, own) for index in indexes]
        return {"topic_name": topic, "topic_id": view.id, "partitions": partitions}

    # ---- alter ----

    async def alter(self, request: Any) -> dict[str, Any]:
        answer: dict[str, Any] = {"throttle_time": 0, "error_code": 0, "error_message": None, "responses": []}
        try:
            check_group(request.group_id)
        except ShareError as error:
            return answer | {"error_code": error.code, "error_message": error.message}
        answer["responses"] = [await self._altered(request.group_id, one) for one in request.topics]
        live = [
            p for t in answer["responses"] for p in t["partitions"] if p["error_code"] == Code.NON_EMPTY_GROUP
        ]
        if live:
            answer |= {"error_code": Code.NON_EMPTY_GROUP, "error_message": live[0]["error_message"]}
        return answer

    async def _altered(self, name: str, wanted: Any) -> dict[str, Any]:
        code, message, id = Code.NONE, None, None
        try:
            self._permit("reset", wanted.topic_name)
            view = await self._topics.view(wanted.topic_name, fresh=True)
            id = view.id
            await self._reset(view, name, wanted.partitions)
        except GroupLive as error:
            code, message = Code.NON_EMPTY_GROUP, str(error)
        except PostroomError as error:
            code, message = code_of(error), str(error)
        return {
            "topic_name": wanted.topic_name, "topic_id": id, "partitions": [
                {"partition_index": one.partition_index, "error_code": code, "error_message": message}
                for one in wanted.partitions
            ],
        }  # fmt: skip

    async def _reset(self, view: KafkaTopic, name: str, wanted: Iterable[Any]) -> None:
        offsets: dict[int, int] = {}
        ids = [link.partition_id for chain in view.chains for link in chain.links]
        edges = await self._broker.in_thread(self._broker.store.log.bounds, ids)
        for one in wanted:
            chain = view.chain(one.partition_index)
            if chain is None or not chain.links:
                raise UnknownPartition(f"topic {view.name!r} has {len(view.chains)} partitions")
            if not 0 <= one.start_offset < 2**62:
                raise InvalidSetting(f"offset {one.start_offset} is none: from 0 on")
            at = chain.at(one.start_offset)
            for number, link in enumerate(chain.links):
                edge = edges[link.partition_id]
                offset = edge.end if number < at else edge.start
                offsets[link.number] = one.start_offset - link.origin if number == at else offset
        start = Start("offsets", offsets=tuple(sorted(offsets.items())))
        try:
            await self._broker.reset(view.name, share_group(name), start, False)
        except UnknownGroup:
            await self._groups.make(view.name, name, GroupWish(mode="shared", start=start))

    # ---- delete ----

    async def delete(self, request: Any) -> dict[str, Any]:
        answer: dict[str, Any] = {"throttle_time": 0, "error_code": 0, "error_message": None, "responses": []}
        try:
            check_group(request.group_id)
        except ShareError as error:
            return answer | {"error_code": error.code, "error_message": error.message}
        answer["responses"] = [
            await self._deleted(request.group_id, one.topic_name) for one in request.topics
        ]
        return answer

    async def _deleted(self, name: str, topic: str) -> dict[str, Any]:
        answer: dict[str, Any] = {
            "topic_name": topic,
            "topic_id": None,
            "error_code": 0,
            "error_message": None,
        }
        try:
            self._permit("delete_group", topic)
            answer["topic_id"] = (await self._topics.view(topic)).id
            await self._broker.delete_group(topic, share_group(name), False)
        except GroupLive as error:
            return answer | {"error_code": Code.NON_EMPTY_GROUP, "error_message": str(error)}
        except UnknownGroup as error:
            return answer | {"error_code": Code.GROUP_ID_NOT_FOUND, "error_message": str(error)}
        except PostroomError as error:
            return answer | {"error_code": code_of(error), "error_message": str(error)}
        return answer


def _told(chain: Chain | None, index: int, lags: dict[int, PartitionLag]) -> dict[str, Any]:
    """How far a group is in a Kafka partition: in the first of its chain that has something left."""
    if chain is None:
        return _partition(index, error=UnknownPartition("there is no such partition"))
    known = [(link, lags[link.number]) for link in chain.links if link.number in lags]
    if not known:
        return _partition(index)
    link, lag = next(((k, x) for k, x in known if x.committed < x.end - int(x.sealed)), known[-1])
    return _partition(index, link.origin + lag.committed, sum(one.messages for _, one in known))


def _partition(
    index: int, offset: int = _NO_OFFSET, lag: int = -1, *, error: PostroomError | None = None
) -> dict[str, Any]:
    return {
        "partition_index": index, "start_offset": offset, "leader_epoch": 0, "lag": lag,
        "error_code": 0 if error is None else code_of(error),
        "error_message": None if error is None else str(error),
    }  # fmt: skip
