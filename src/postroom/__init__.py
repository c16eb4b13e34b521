"""Postroom: a message queue for teams that already run a database and write Python.

async with postroom.connect("sqlite:///orders.db") as mq:
    await mq.create_topic("orders", exist_ok=True)
    await mq.send("orders", b"…", key="42")
    async with mq.consumer("orders", group="billing") as consumer:
        async for message in consumer:
            await message.ack()
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import (
    AccessDenied,
    AccessError,
    AppendError,
    BacklogFull,
    BrokerUnavailable,
    CatalogError,
    ClosedError,
    CorruptBatch,
    DataLoss,
    DecodeError,
    DeliveryError,
    ForkError,
    GateClosed,
    GenerationChanged,
    GroupConflict,
    GroupExists,
    GroupLive,
    InvalidMessage,
    InvalidName,
    InvalidSetting,
    InvalidURL,
    LeaseLost,
    LimitReached,
    MessageTooLarge,
    NoReply,
    NotAuthenticated,
    PartitionSealed,
    PermissionDenied,
    PostroomError,
    PrincipalExists,
    ProducerFenced,
    ProtocolError,
    RequestError,
    RequestFailed,
    RouteConflict,
    SchemaMismatch,
    SendTimeout,
    SequenceGap,
    ShardUnknown,
    StagingConflict,
    StoreBusy,
    StoreCorrupt,
    StoreError,
    StoreFull,
    StoreUnavailable,
    TopicConflict,
    TopicExists,
    UnknownFate,
    UnknownGroup,
    UnknownPartition,
    UnknownPrincipal,
    UnknownProducer,
    UnknownTask,
    UnknownTopic,
    UsageError,
)

if TYPE_CHECKING:
    __version__: str
    from . import sync, tracing
    from .client import guards
    from .client.app.app import App
    from .client.app.handler import Dead, RetryLater
    from .client.app.subscription import Batch
    from .client.app.supervisor import AppHealth, HandlerHealth
    from .client.app.task import Task
    from .client.connection import Connection, connect
    from .client.consumer.consumer import Consumer
    from .client.consumer.schedules import ScheduleInfo
    from .client.forward.outbox import Outbox
    from .client.forward.outbox_table import OutboxStatus
    from .client.forward.spool import Spool
    from .client.forward.spool_file import Spooled
    from .client.message import DeadLetter, Delayed, Message, Receipt, Received, Stopped
    from .client.producer.producer import Producer
    from .endpoint.values import (
        GroupInfo,
        Lag,
        MemberInfo,
        PartitionLag,
        PartitionReset,
        PrincipalInfo,
        ResetPlan,
        ShardInfo,
        TopicInfo,
    )
    from .model.audit import AuditEntry
    from .model.delivery.retry import Backoff
    from .model.policy.slow_lane import LaneInfo, SlowLane, SlowSource
    from .model.topology.route import Change, Range, Route

__all__ = [
    "AccessDenied",
    "AccessError",
    "App",
    "AppHealth",
    "AppendError",
    "AuditEntry",
    "BacklogFull",
    "Backoff",
    "Batch",
    "BrokerUnavailable",
    "CatalogError",
    "Change",
    "ClosedError",
    "Connection",
    "Consumer",
    "CorruptBatch",
    "DataLoss",
    "Dead",
    "DeadLetter",
    "DecodeError",
    "Delayed",
    "DeliveryError",
    "ForkError",
    "GateClosed",
    "GenerationChanged",
    "GroupConflict",
    "GroupExists",
    "GroupInfo",
    "GroupLive",
    "HandlerHealth",
    "InvalidMessage",
    "InvalidName",
    "InvalidSetting",
    "InvalidURL",
    "Lag",
    "LaneInfo",
    "LeaseLost",
    "LimitReached",
    "MemberInfo",
    "Message",
    "MessageTooLarge",
    "NoReply",
    "NotAuthenticated",
    "Outbox",
    "OutboxStatus",
    "PartitionLag",
    "PartitionReset",
    "PartitionSealed",
    "PermissionDenied",
    "PostroomError",
    "PrincipalExists",
    "PrincipalInfo",
    "Producer",
    "ProducerFenced",
    "ProtocolError",
    "Range",
    "RateInfo",
    "Receipt",
    "Received",
    "RequestError",
    "RequestFailed",
    "ResetPlan",
    "RetryLater",
    "Route",
    "RouteConflict",
    "ScheduleInfo",
    "SchemaMismatch",
    "SendTimeout",
    "SequenceGap",
    "ShardInfo",
    "ShardUnknown",
    "SlowLane",
    "SlowSource",
    "Spool",
    "Spooled",
    "StagingConflict",
    "Stopped",
    "StoreBusy",
    "StoreCorrupt",
    "StoreError",
    "StoreFull",
    "StoreUnavailable",
    "Task",
    "TopicConflict",
    "TopicExists",
    "TopicInfo",
    "UnknownFate",
    "UnknownGroup",
    "UnknownPartition",
    "UnknownPrincipal",
    "UnknownProducer",
    "UnknownTask",
    "UnknownTopic",
    "UsageError",
    "connect",
    "guards",
    "sync",
    "tracing",
]

# Imported when they are first asked for: the command line starts three times as fast.
_HOMES = {
    "model.audit": ("AuditEntry",),
    "endpoint.values": (
        "GroupInfo",
        "Lag",
        "MemberInfo",
        "PartitionLag",
        "PartitionReset",
        "PrincipalInfo",
        "RateInfo",
        "ResetPlan",
        "ShardInfo",
        "StagingConflict",
        "TopicInfo",
    ),
    "client.app.app": ("App",),
    "client.app.handler": ("Dead", "RetryLater"),
    "client.app.supervisor": ("AppHealth", "HandlerHealth"),
    "client.app.subscription": ("Batch",),
    "client.app.task": ("Task",),
    "client.connection": ("Connection", "connect"),
    "client.consumer.consumer": ("Consumer",),
    "client.consumer.schedules": ("ScheduleInfo",),
    "client.message": ("DeadLetter", "Delayed", "Message", "Receipt", "Received", "Stopped"),
    "client.forward.outbox": ("Outbox",),
    "client.forward.outbox_table": ("OutboxStatus",),
    "client.producer.producer": ("Producer",),
    "client.forward.spool_file": ("Spooled",),
    "client.forward.spool": ("Spool",),
    "model.policy.slow_lane": ("LaneInfo", "SlowLane", "SlowSource"),
    "model.delivery.retry": ("Backoff",),
    "model.topology.route": ("Change", "Range", "Route"),
}
_MODULES = {"guards": ".client.guards", "sync": ".sync", "tracing": ".tracing"}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(_MODULES[name], __name__)
    if name == "__version__":  # of what is installed; looked up when it is asked for
        from importlib.metadata import version

        return version("postroom")
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
