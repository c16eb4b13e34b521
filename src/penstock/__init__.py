"""Penstock: a message queue for teams that already run a database and write Python.

async with penstock.connect("sqlite:///orders.db") as mq:
    await mq.create_topic("orders", exist_ok=True)
    await mq.send("orders", b"…", key="42")
    async with mq.consumer("orders", group="billing") as consumer:
        async for message in consumer:
            await message.ack()
"""

from __future__ import annotations

from . import sync
from .broker.endpoint import GroupInfo, Lag, MemberInfo, PartitionLag, TopicInfo
from .client.app.app import App
from .client.app.handler import Dead, RetryLater
from .client.app.subscription import Batch
from .client.connection import Connection, connect
from .client.consuming.consumer import Consumer
from .client.message import DeadLetter, Message, Receipt, Received
from .client.producing.producer import Producer
from .errors import (
    AppendError,
    CatalogError,
    ClosedError,
    CorruptBatch,
    DecodeError,
    DeliveryError,
    ForkError,
    GenerationChanged,
    GroupConflict,
    GroupExists,
    GroupLive,
    InvalidMessage,
    InvalidName,
    InvalidSetting,
    InvalidURL,
    LeaseLost,
    MessageTooLarge,
    PartitionSealed,
    PenstockError,
    ProducerFenced,
    SchemaMismatch,
    SendTimeout,
    SequenceGap,
    StoreBusy,
    StoreCorrupt,
    StoreError,
    StoreFull,
    StoreUnavailable,
    TopicExists,
    UnknownFate,
    UnknownGroup,
    UnknownPartition,
    UnknownProducer,
    UnknownTopic,
    UsageError,
)
from .model.retry import Backoff
from .model.route import Range, Route

__all__ = [
    "App",
    "AppendError",
    "Backoff",
    "Batch",
    "CatalogError",
    "ClosedError",
    "Connection",
    "Consumer",
    "CorruptBatch",
    "Dead",
    "DeadLetter",
    "DecodeError",
    "DeliveryError",
    "ForkError",
    "GenerationChanged",
    "GroupConflict",
    "GroupExists",
    "GroupInfo",
    "GroupLive",
    "InvalidMessage",
    "InvalidName",
    "InvalidSetting",
    "InvalidURL",
    "Lag",
    "LeaseLost",
    "MemberInfo",
    "Message",
    "MessageTooLarge",
    "PartitionLag",
    "PartitionSealed",
    "PenstockError",
    "Producer",
    "ProducerFenced",
    "Range",
    "Receipt",
    "Received",
    "RetryLater",
    "Route",
    "SchemaMismatch",
    "SendTimeout",
    "SequenceGap",
    "StoreBusy",
    "StoreCorrupt",
    "StoreError",
    "StoreFull",
    "StoreUnavailable",
    "TopicExists",
    "TopicInfo",
    "UnknownFate",
    "UnknownGroup",
    "UnknownPartition",
    "UnknownProducer",
    "UnknownTopic",
    "UsageError",
    "connect",
    "sync",
]
