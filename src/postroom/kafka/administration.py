"""Topics and their configuration, as Kafka's admin clients ask for them.

What Postroom has under another name is translated (`retention.ms`); what Kafka alone has, since it is about
its files, is taken and ignored; what would be a promise that is not kept (`cleanup.policy=compact`) is
refused with a sentence.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..broker.served import Servable
from ..config import DEFAULTS, SLOTS
from ..errors import InvalidSetting, PostroomError, TopicExists, UnknownTopic
from ..model.policy.settings import TopicSettings
from ..model.topology.names import check_topic
from .apis import Code, code_of
from .topics import Topics

__all__ = ["Administration", "configured", "described"]

_TOPIC, _BROKER = 2, 4  # kinds of resources
_SET, _DELETE = 0, 1  # operations on a config
_OWN, _DEFAULT = 1, 5  # sources of a config
_STRING, _INT, _LONG, _BOOLEAN, _LIST = 2, 3, 5, 1, 7  # types of a config
_LAST_EPOCH = 32_767

# Of a topic: what is reported, and cannot be another.
_FIXED: Mapping[str, tuple[str, int]] = {
    "cleanup.policy": ("delete", _LIST),
    "compression.type": ("producer", _STRING),
    "max.message.bytes": (str(DEFAULTS.max_batch_bytes), _INT),
    "message.timestamp.type": ("CreateTime", _STRING),
    "min.insync.replicas": ("1", _INT),
}
# These are about Kafka's files and replicas: whatever is said is true of a queue on a database.
_IGNORED = frozenset(
    {
        "delete.retention.ms", "file.delete.delay.ms", "flush.messages", "flush.ms", "index.interval.bytes",
        "max.compaction.lag.ms", "message.downconversion.enable", "message.format.version",
        "message.timestamp.after.max.ms", "message.timestamp.before.max.ms",
        "message.timestamp.difference.max.ms", "min.cleanable.dirty.ratio", "min.compaction.lag.ms",
        "preallocate", "segment.bytes", "segment.index.bytes", "segment.jitter.ms", "segment.ms",
        "unclean.leader.election.enable",
    }
)  # fmt: skip
_RETENTION = {"retention.ms": "retention_ms", "retention.bytes": "retention_bytes"}


@dataclass(frozen=True, slots=True)
class _Config:
    name: str
    value: str
    type: int
    own: bool = False  # somebody has set it
    fixed: bool = False


def configured(settings: TopicSettings, asked: Mapping[str, str | None]) -> TopicSettings:
    """The settings with these configs of Kafka's; None is the default. InvalidSetting says what cannot be."""
    for name, value in asked.items():
        field = _RETENTION.get(name)
        if field is not None:
            number: int = getattr(TopicSettings(), field) if value is None else _number(name, value)
            kept: dict[str, Any] = {field: max(0, number)}  # -1 is no limit, here it is 0
            settings = replace(settings, **kept)
        elif name in _FIXED and value not in (None, _FIXED[name][0]):
            more = "; there is no compaction" if name == "cleanup.policy" else ""
            raise InvalidSetting(f"{name}={value!r}: it is {_FIXED[name][0]!r} here, and stays so{more}")
        elif name not in _FIXED and name not in _IGNORED:
            raise InvalidSetting(f"there is no config {name!r}; set {', '.join(_RETENTION)}")
    return settings


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
    for name, field in _RETENTION.items():
        value = getattr(settings, field)
        found.append(_Config(name, str(value or -1), _LONG, own=value != getattr(TopicSettings(), field)))
    return sorted(found, key=lambda one: one.name)


class Administration:
    """`permit`: operation and topic (None: the queue); PermissionDenied."""

    def __init__(
        self, broker: Servable, topics: Topics, permit: Callable[[str, str | None], None], *, creates: bool
    ) -> None:
        self._broker, self._topics, self._permit, self._creates = broker, topics, permit, creates

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
            settings = configured(TopicSettings(kafka_partitions=count), asked)
            await self._refuse_existing(check_topic(wanted.name))
            if not validate_only:
                await self.create(wanted.name, settings, count)
            view = None if validate_only else await self._topics.view(wanted.name, fresh=True)
        except PostroomError as error:
            return _refused(wanted.name, code_of(error), str(error))
        configs = [
            {"name": c.name, "value": c.value, "read_only": c.fixed, "is_sensitive": False,
             "config_source": _OWN if c.own else _DEFAULT}
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
        if kind != _BROKER:
            raise InvalidSetting("only topics and brokers have configs here")
        return [
            _Config("auto.create.topics.enable", str(self._creates).lower(), _BOOLEAN, fixed=True),
            _Config("default.replication.factor", "1", _INT, fixed=True),
            _Config("log.cleanup.policy", "delete", _LIST, fixed=True),
            _Config("log.retention.ms", str(TopicSettings().retention_ms), _LONG, fixed=True),
            _Config("message.max.bytes", str(DEFAULTS.max_batch_bytes), _INT, fixed=True),
            _Config("num.partitions", str(DEFAULTS.partitions), _INT, fixed=True),
        ]

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
        if resource.resource_type != _TOPIC:
            raise InvalidSetting("only configs of topics can be changed; a broker's are in its settings")
        name = resource.resource_name
        self._permit("alter_topic", name)
        asked: dict[str, str | None] = {}
        for one in resource.configs or ():
            if one.config_operation not in (_SET, _DELETE):
                raise InvalidSetting(f"{one.name} is no list: set it, or delete it for the default")
            asked[one.name] = one.value if one.config_operation == _SET else None
        settings = configured((await self._topics.view(name, fresh=True)).topic.settings, asked)
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
        "config_source": _OWN if config.own else _DEFAULT,
        "synonyms": [], "config_type": config.type, "documentation": None,
    }  # fmt: skip
