"""Topics, their configuration and what is deleted of them, as Kafka's admin clients ask for it.

What Postroom has under another name is translated (`retention.ms`); what Kafka alone has, since it is about
its files, is taken and ignored; what would be a promise that is not kept (`cleanup.policy=compact`) is
refused with a sentence.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from ..broker.served import Servable
from ..config import DEFAULTS, SLOTS
from ..errors import InvalidSetting, PostroomError, TopicExists, UnknownPartition, UnknownTopic
from ..model.messages.slot import Keys
from ..model.policy.settings import TopicSettings
from ..model.topology.chain import Chain
from ..model.topology.names import check_topic
from .apis import Code, code_of
from .metadata import KAFKA_KEYS, Cluster
from .reading import log_end, log_start
from .share.groups import ShareGroups
from .topics import Topics

__all__ = ["Administration", "configured", "described"]

_TOPIC, _BROKER, _GROUP = 2, 4, 32  # kinds of resources
_SET, _DELETE = 0, 1  # operations on a config
_OWN, _STATIC, _DEFAULT = 1, 4, 5  # sources of a config
_STRING, _INT, _LONG, _DOUBLE, _BOOLEAN, _LIST = 2, 3, 5, 6, 1, 7  # types of a config
_LAST_EPOCH = 32_767
_TO_THE_END = -1  # of a partition, all of which is deleted
_NOWHERE = -1

# Of a topic: what is reported, and cannot be another.
_FIXED: Mapping[str, tuple[str, int]] = {
    "cleanup.policy": ("delete", _LIST),
    "message.timestamp.type": ("CreateTime", _STRING),
}
_RETENTION = {"retention.ms": "retention_ms", "retention.bytes": "retention_bytes"}
_KEYS = "postroom.keys"  # of a topic that is made
_FOREVER = str(2**63 - 1)
# What is taken, and told again to whoever asks. But for the first it is about Kafka's files and replicas:
# whatever is said is true of a queue on a database, which keeps batches as they were sent.
_TAKEN: Mapping[str, tuple[str, int]] = {
    "max.message.bytes": (str(DEFAULTS.max_batch_bytes), _INT),
    "compression.type": ("producer", _STRING),
    "delete.retention.ms": ("86400000", _LONG),
    "file.delete.delay.ms": ("60000", _LONG),
    "flush.messages": (_FOREVER, _LONG),
    "flush.ms": (_FOREVER, _LONG),
    "index.interval.bytes": ("4096", _INT),
    "max.compaction.lag.ms": (_FOREVER, _LONG),
    "message.downconversion.enable": ("true", _BOOLEAN),
    "message.format.version": ("3.0-IV1", _STRING),
    "message.timestamp.after.max.ms": (_FOREVER, _LONG),
    "message.timestamp.before.max.ms": (_FOREVER, _LONG),
    "message.timestamp.difference.max.ms": (_FOREVER, _LONG),
    "min.cleanable.dirty.ratio": ("0.5", _DOUBLE),
    "min.compaction.lag.ms": ("0", _LONG),
    "min.insync.replicas": ("1", _INT),
    "preallocate": ("false", _BOOLEAN),
    "segment.bytes": ("1073741824", _INT),
    "segment.index.bytes": ("10485760", _INT),
    "segment.jitter.ms": ("0", _LONG),
    "segment.ms": ("604800000", _LONG),
    "unclean.leader.election.enable": ("false", _BOOLEAN),
}
_COMPRESSIONS = ("producer", "uncompressed", "gzip", "snappy", "lz4", "zstd")
_LONGEST_VALUE = 120


@dataclass(frozen=True, slots=True)
class _Config:
    name: str
    value: str
    type: int
    own: bool = False  # somebody has set it
    fixed: bool = False
    static: bool = False  # by the settings that a broker was started with

    @property
    def source(self) -> int:
        return _STATIC if self.static else _OWN if self.own else _DEFAULT


def configured(settings: TopicSettings, asked: Mapping[str, str | None]) -> TopicSettings:
    """The settings with these configs of Kafka's; None is the default. InvalidSetting says what cannot be."""
    taken = dict(settings.kafka_configs)
    for name, value in asked.items():
        if name in _RETENTION:
            field = _RETENTION[name]
            number: int = getattr(TopicSettings(), field) if value is None else _number(name, value)
            kept: dict[str, Any] = {field: max(0, number)}  # -1 is no limit, here it is 0
            settings = replace(settings, **kept)
        elif name == _KEYS:
            settings = replace(settings, keys=cast("Keys", value or settings.keys))
        elif name in _TAKEN:
            taken.pop(name, None)
            if value is not None:
                taken[name] = _checked(name, value)
        elif name not in _FIXED:
            raise InvalidSetting(f"there is no config {name!r}; set {', '.join(_RETENTION)}")
        elif value not in (None, _FIXED[name][0]):
            more = "; there is no compaction" if name == "cleanup.policy" else ""
            raise InvalidSetting(f"{name}={value!r}: it is {_FIXED[name][0]!r} here, and stays so{more}")
    return replace(settings, kafka_configs=tuple(sorted(taken.items())))


def _checked(name: str, value: str) -> str:
    """The value, if Kafka would take it, too."""
    if name == "compression.type" and value not in _COMPRESSIONS:
        raise InvalidSetting(f"{name}={value!r}: choose one of {', '.join(_COMPRESSIONS)}")
    if _TAKEN[name][1] in (_INT, _LONG) and _number(name, value) < 0:
        raise InvalidSetting(f"{name}={value!r}: a whole number from 0 up")
    if len(value) > _LONGEST_VALUE:
        raise InvalidSetting(f"{name} has {len(value):,} characters: write {_LONGEST_VALUE} at most")
    return value


def _number(name: str, value: str) -> int:
    try:
        found = int(value)
    except ValueError:
        found = -2
    if not -1 <= found < 2**63:
        raise InvalidSetting(f"{name}={value!r}: a whole number, or -1 for no limit")
    return found


def described(settings: TopicSettings) -> list[_Config]:
    """Every config of a topic."""
    found = [_Config(name, value, kind, fixed=True) for name, (value, kind) in _FIXED.items()]
    own = dict(settings.kafka_configs)
    for name, (value, kind) in _TAKEN.items():
        found.append(_Config(name, own.get(name, value), kind, own=name in own))
    for name, field in _RETENTION.items():
        kept = getattr(settings, field)
        found.append(_Config(name, str(kept or -1), _LONG, own=kept != getattr(TopicSettings(), field)))
    if settings.kafka_partitions:
        found.append(_Config(_KEYS, settings.keys, _STRING, own=True, fixed=True))
    return sorted(found, key=lambda one: one.name)


class Administration:
    """`permit`: operation and topic (None: the queue); PermissionDenied."""

    def __init__(
        self,
        broker: Servable,
        topics: Topics,
        permit: Callable[[str, str | None], None],
        cluster: Cluster,
        share_groups: ShareGroups,
    ) -> None:
        self._broker, self._topics, self._permit, self._cluster = broker, topics, permit, cluster
        self._share_groups = share_groups

    async def create(self, name: str, settings: TopicSettings, partitions: int) -> None:
        await self._broker.create_topic(check_topic(name), settings, partitions, False)

    async def create_topics(self, request: Any) -> dict[str, Any]:
        names = [one.name for one in request.topics or ()]
        made = [
            await self._create_one(one, request.validate_only)
            if names.count(one.name) == 1
            else _refused(one.name, Code.INVALID_REQUEST, "the request names this topic twice")
            for one in request.topics or ()
        ]
        return {"throttle_time": 0, "topics": made}

    async def _create_one(self, wanted: Any, validate_only: bool) -> dict[str, Any]:
        count = len(wanted.assignments or ()) or wanted.num_partitions
        count = DEFAULTS.partitions if count == -1 else count
        if not 1 <= count <= SLOTS:
            return _refused(wanted.name, Code.INVALID_PARTITIONS, f"choose 1 to {SLOTS} partitions")
        try:
            self._permit("create_topic", wanted.name)
            asked = {one.name: one.value for one in wanted.configs or ()}
            settings = configured(TopicSettings(kafka_partitions=count, keys=KAFKA_KEYS), asked)
            settings.check_kafka()
            await self._refuse_existing(check_topic(wanted.name))
            if not validate_only:
                await self.create(wanted.name, settings, count)
            view = None if validate_only else await self._topics.view(wanted.name, fresh=True)
        except PostroomError as error:
            return _refused(wanted.name, code_of(error), str(error))
        configs = [
            {"name": c.name, "value": c.value, "read_only": c.fixed, "is_sensitive": False,
             "config_source": c.source}
            for c in described(settings)
        ]  # fmt: skip
        return {
            "name": wanted.name, "topic_id": None if view is None else view.id, "error_code": 0,
            "error_message": None, "num_partitions": count, "replication_factor": 1, "configs": configs,
        }  # fmt: skip

    async def _refuse_existing(self, name: str) -> None:
        try:
            await self._topics.view(name, fresh=True)
        except UnknownTopic:
            return
        raise TopicExists(f"there is a topic {name!r} already", topic=name)

    async def delete_topics(self, request: Any) -> dict[str, Any]:
        by_name = getattr(request, "topic_names", None)
        wanted = [(name, None) for name in by_name or ()]
        wanted += [(one.name, one.topic_id) for one in getattr(request, "topics", None) or ()]
        return {"throttle_time": 0, "responses": [await self._delete_one(*one) for one in wanted]}

    async def _delete_one(self, name: str | None, id: Any) -> dict[str, Any]:
        answer = {"name": name, "topic_id": id, "error_code": 0, "error_message": None}
        try:
            if name is None:
                view = await self._topics.by_id(id)
                name = view.name
            self._permit("delete_topic", name)
            await self._broker.delete_topic(name)
            return answer | {"name": name}
        except PostroomError as error:
            code = code_of(error)
            if answer["name"] is None and code == Code.UNKNOWN_TOPIC_OR_PARTITION:
                code = Code.UNKNOWN_TOPIC_ID
            return answer | {"error_code": code, "error_message": str(error)}

    # ---- records ----

    async def delete_records(self, request: Any) -> dict[str, Any]:
        topics = []
        for wanted in request.topics or ():
            found = [await self._delete_before(wanted.name, one) for one in wanted.partitions or ()]
            topics.append({"name": wanted.name, "partitions": found})
        return {"throttle_time": 0, "topics": topics}

    async def _delete_before(self, topic: str, wanted: Any) -> dict[str, Any]:
        answer = {"partition_index": wanted.partition_index, "low_watermark": _NOWHERE, "error_code": 0}
        try:
            self._permit("purge", topic)
            chain = (await self._topics.view(topic, fresh=True)).chain(wanted.partition_index)
            if chain is None or not chain.links:
                raise UnknownPartition(f"topic {topic!r} has no partition {wanted.partition_index}")
            start = await self._broker.audited(
                "delete_records",
                (topic, ""),
                lambda: self._broker.in_thread(self._trimmed, chain, wanted.offset),
                asked={"partition": wanted.partition_index, "offset": wanted.offset},
            )
        except PostroomError as error:
            return answer | {"error_code": code_of(error)}
        if start is None:
            return answer | {"error_code": Code.OFFSET_OUT_OF_RANGE}
        return answer | {"low_watermark": start}

    def _trimmed(self, chain: Chain, offset: int) -> int | None:
        """Keep nothing before an offset; returns where the log starts. None: it has no such offset."""
        log, ids = self._broker.store.log, [link.partition_id for link in chain.links]
        edges = log.bounds(ids)
        end = log_end(chain.newest, edges[chain.newest.partition_id])
        offset = end if offset == _TO_THE_END else offset
        if not 0 <= offset <= end:
            return None
        for link in chain.links:
            edge = edges[link.partition_id]
            read = offset >= log_end(link, edge)  # the seal goes with what is before it
            below = edge.end if read else offset - link.origin
            if below > edge.start:
                log.trim(link.partition_id, below)
        edges = log.bounds(ids)
        return log_start(chain, [edges[id] for id in ids])

    # ---- configs ----

    async def describe_configs(self, request: Any) -> dict[str, Any]:
        found = []
        for one in request.resources or ():
            answer = {
                "error_code": 0, "error_message": None, "resource_type": one.resource_type,
                "resource_name": one.resource_name, "configs": [],
            }  # fmt: skip
            try:
                configs = await self._configs(one.resource_type, one.resource_name)
                wanted = one.configuration_keys
                answer["configs"] = [_shown(c) for c in configs if wanted is None or c.name in wanted]
            except PostroomError as error:
                answer |= {"error_code": code_of(error), "error_message": str(error)}
            found.append(answer)
        return {"throttle_time": 0, "results": found}

    async def _configs(self, kind: int, name: str) -> list[_Config]:
        if kind == _TOPIC:
            self._permit("topic", name)
            return described((await self._topics.view(name, fresh=True)).topic.settings)
        if kind == _GROUP:
            return [_Config(*one) for one in await self._share_groups.configs(name)]
        if kind != _BROKER:
            raise InvalidSetting("only topics, share groups and brokers have configs here")
        return [
            *self._reached(name),
            _Config(
                "auto.create.topics.enable", str(self._cluster.creates_topics).lower(), _BOOLEAN, fixed=True
            ),
            _Config("default.replication.factor", "1", _INT, fixed=True),
            _Config("log.cleanup.policy", "delete", _LIST, fixed=True),
            _Config("log.retention.ms", str(TopicSettings().retention_ms), _LONG, fixed=True),
            _Config("message.max.bytes", str(DEFAULTS.max_batch_bytes), _INT, fixed=True),
            _Config("num.partitions", str(DEFAULTS.partitions), _INT, fixed=True),
        ]

    def _reached(self, name: str) -> list[_Config]:
        """Where a broker is reached; without a number, what is said is true of all of them."""
        if not name:
            return []
        nodes = {str(node.id): node for node in self._cluster.nodes}
        if name not in nodes:
            raise InvalidSetting(f"there is no broker {name!r}; there are {', '.join(nodes)}")
        where = f"{self._cluster.protocol}://{nodes[name].host}:{nodes[name].port}"
        found = [
            ("advertised.listeners", where, _LIST),
            ("listeners", where, _LIST),
            ("broker.id", name, _INT),
        ]
        return [_Config(*one, fixed=True, static=True) for one in found]

    async def alter_configs(self, request: Any) -> dict[str, Any]:
        found = []
        for one in request.resources or ():
            answer = {
                "error_code": 0, "error_message": None, "resource_type": one.resource_type,
                "resource_name": one.resource_name,
            }  # fmt: skip
            try:
                await self._alter(one, validate_only=request.validate_only)
            except PostroomError as error:
                answer |= {"error_code": code_of(error), "error_message": str(error)}
            found.append(answer)
        return {"throttle_time": 0, "responses": found}

    async def _alter(self, resource: Any, *, validate_only: bool) -> None:
        name = resource.resource_name
        if resource.resource_type not in (_TOPIC, _GROUP):
            raise InvalidSetting(
                "configs of topics and share groups can be changed; a broker's are in its settings"
            )
        if resource.resource_type == _TOPIC:
            self._permit("alter_topic", name)
        asked: dict[str, str | None] = {}
        for one in resource.configs or ():
            if one.config_operation not in (_SET, _DELETE):
                raise InvalidSetting(f"{one.name} is no list: set it, or delete it for the default")
            asked[one.name] = one.value if one.config_operation == _SET else None
        if resource.resource_type == _GROUP:
            return await self._share_groups.alter(name, asked, validate_only=validate_only)
        before = (await self._topics.view(name, fresh=True)).topic.settings
        settings = configured(before, asked)
        if settings.keys != before.keys:
            raise InvalidSetting(f"{_KEYS} is {before.keys!r}, and stays so: make another topic")
        if not validate_only:
            await self._broker.alter_topic(name, settings)

    # ---- producers ----

    async def init_producer_id(self, request: Any) -> dict[str, Any]:
        """An id for an idempotent producer; there are no transactions, and that is said at once."""
        answer = {"throttle_time": 0, "error_code": 0, "producer_id": -1, "producer_epoch": -1}
        if request.transactional_id is not None:
            return answer | {"error_code": Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED}
        before, epoch = getattr(request, "producer_id", -1), getattr(request, "producer_epoch", -1)
        if before >= 0 and 0 <= epoch < _LAST_EPOCH:
            return answer | {"producer_id": before, "producer_epoch": epoch + 1}
        return answer | {"producer_id": secrets.randbits(63), "producer_epoch": 0}


def _refused(name: str, code: int, message: str) -> dict[str, Any]:
    return {
        "name": name, "topic_id": None, "error_code": code, "error_message": message, "num_partitions": -1,
        "replication_factor": -1, "configs": None,
    }  # fmt: skip


def _shown(config: _Config) -> dict[str, Any]:
    return {
        "name": config.name, "value": config.value, "read_only": config.fixed, "is_sensitive": False,
        "config_source": config.source,
        "synonyms": [], "config_type": config.type, "documentation": None,
    }  # fmt: skip
