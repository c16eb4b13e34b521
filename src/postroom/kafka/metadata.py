"""Metadata and DescribeCluster: which brokers and topics there are, and who leads a partition.

Any broker serves any partition. A leader is named so that clients gather at one broker, which makes batches
and caches good: by rendezvous of the partition and the brokers that live, and so the same one before and
after a move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import Any, Protocol
from uuid import UUID

from ..errors import PermissionDenied, PostroomError, TopicExists, UnknownTopic
from ..model.messages.slot import Keys
from ..model.policy.settings import TopicSettings
from ..model.topology.names import is_internal
from ..store.contract import Topic
from .apis import Code, code_of
from .hot import NO_OPERATIONS, Metadata, MetadataTopic, Node
from .topics import KafkaTopic, Topics

__all__ = ["KAFKA_KEYS", "Cluster", "Describing", "leader_of"]

KAFKA_KEYS: Keys = "java"  # of a topic that a Kafka client makes: most of them follow this rule
_AUTO_PARTITIONS = 4  # of a topic that is made because somebody asked for it; clients' own tests expect it
_NULL_IS_ALL_FROM, _CREATES_FROM = 1, 4  # versions of Metadata


class Cluster(Protocol):
    """The brokers that listen for Kafka clients, as the server knows them."""

    @property
    def nodes(self) -> tuple[Node, ...]: ...

    @property
    def cluster_id(self) -> str: ...

    @property
    def protocol(self) -> str:
        """What Kafka calls the way to these brokers."""

    @property
    def creates_topics(self) -> bool:
        """Whether a topic is made when a client asks for one that is not there."""


def leader_of(nodes: Sequence[Node], topic_id: int, partition: int) -> int:
    """The node that leads a partition: the same for all who know the same nodes.

    >>> leader_of([Node(7, "a", 1)], 1, 0)
    7
    """
    where = f"{topic_id}/{partition}/".encode()
    return max(nodes, key=lambda node: blake2b(where + b"%d" % node.id, digest_size=8).digest()).id


class Describing:
    """`permit`: operation and topic; PermissionDenied. `visible`: of topics, those that a list shows."""

    def __init__(
        self,
        cluster: Cluster,
        topics: Topics,
        permit: Callable[[str, str], None],
        visible: Callable[[Iterable[str]], set[str]],
        create: Callable[[str, TopicSettings, int], Any],
    ) -> None:
        self._cluster, self._topics = cluster, topics
        self._permit, self._visible, self._create = permit, visible, create

    async def metadata(self, version: int, request: Any) -> Metadata:
        nodes = self._cluster.nodes
        asked = request.topics
        if asked is None or (version < _NULL_IS_ALL_FROM and not asked):
            found = [self._known(nodes, topic) for topic in await self._shown()]
        else:
            creates = version < _CREATES_FROM or request.allow_auto_topic_creation
            found = [await self._asked(nodes, one, creates) for one in asked]
        return Metadata(nodes, self._cluster.cluster_id, nodes[0].id, tuple(found))

    async def _shown(self) -> list[Topic]:
        topics = [topic for topic in await self._topics.all() if not is_internal(topic.name)]
        names = self._visible(topic.name for topic in topics)
        return [topic for topic in topics if topic.name in names]

    async def _asked(self, nodes: Sequence[Node], wanted: Any, creates: bool) -> MetadataTopic:
        name: str | None = wanted.name
        id: UUID | None = getattr(wanted, "topic_id", None)
        try:
            if name is None:
                return self._described(nodes, await self._by_id(id))
            self._permit("topic", name)
            return self._described(nodes, await self._by_name(name, creates))
        except PostroomError as error:
            code = code_of(error)
            if name is None:
                code = Code.UNKNOWN_TOPIC_ID if code == Code.UNKNOWN_TOPIC_OR_PARTITION else code
            return MetadataTopic(code, name, id)

    async def _by_id(self, id: UUID | None) -> KafkaTopic:
        view = await self._topics.by_id(id)
        self._permit("topic", view.name)
        return view

    async def _by_name(self, name: str, creates: bool) -> KafkaTopic:
        try:
            return await self._topics.view(name, fresh=True)
        except UnknownTopic:
            if not (creates and self._cluster.creates_topics):
                raise
        try:
            self._permit("create_topic", name)
            made = TopicSettings(kafka_partitions=_AUTO_PARTITIONS, keys=KAFKA_KEYS)
            await self._create(name, made, _AUTO_PARTITIONS)
        except TopicExists:  # somebody else was faster
            pass
        except PermissionDenied:
            raise UnknownTopic(f"there is no topic {name!r}, and making it needs a permission") from None
        return await self._topics.view(name, fresh=True)

    def _known(self, nodes: Sequence[Node], topic: Topic) -> MetadataTopic:
        count = topic.settings.kafka_partitions or 1 + max(r.partition for r in topic.route.partitions)
        return self._listed(nodes, topic, self._topics.id_of(topic), count)

    def _described(self, nodes: Sequence[Node], view: KafkaTopic) -> MetadataTopic:
        return self._listed(nodes, view.topic, view.id, len(view.chains))

    def _listed(self, nodes: Sequence[Node], topic: Topic, id: UUID, count: int) -> MetadataTopic:
        leaders = tuple(leader_of(nodes, topic.id, index) for index in range(count))
        return MetadataTopic(0, topic.name, id, is_internal(topic.name), leaders)

    async def describe_cluster(self, request: Any) -> dict[str, Any]:
        nodes = self._cluster.nodes
        brokers = [
            {"broker_id": node.id, "host": node.host, "port": node.port, "rack": None, "is_fenced": False}
            for node in nodes
        ]
        return {
            "throttle_time": 0, "error_code": 0, "error_message": None, "endpoint_type": 1,
            "cluster_id": self._cluster.cluster_id, "controller_id": nodes[0].id, "brokers": brokers,
            "cluster_authorized_operations": NO_OPERATIONS,
        }  # fmt: skip
