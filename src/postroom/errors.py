"""Every error Postroom raises, as one tree.

PostroomError                     code, retriable, and a sentence that says what to do next
├── UsageError                    the call is wrong: change the call
│   ├── InvalidURL                the address cannot be understood
│   ├── InvalidName               a topic, group or header name is not allowed
│   ├── InvalidMessage            key, value, header or id of the wrong type
│   ├── InvalidSetting            a setting has the wrong type or range
│   ├── MessageTooLarge           over the limit on a message, a batch or a header
│   ├── ClosedError               used after close
│   ├── ForkError                 used in a child process after fork
│   └── DecodeError               a handler's annotation does not fit the message
│       └── UnknownTask           a message names a task that the app does not have
├── CatalogError                  what the call names is not there, or there already
│   ├── UnknownTopic, TopicExists
│   ├── UnknownGroup, GroupExists
│   ├── TopicConflict             the topic is there, with other settings than are asked for
│   ├── UnknownPartition
│   ├── GroupConflict             a consumer asks for settings the group does not have
│   ├── UnknownPrincipal, PrincipalExists
│   ├── DataLoss                  messages that were to be read were dropped before
│   ├── RouteConflict             another change of the route is under way, or came first (retriable)
│   ├── StagingConflict           a job's batch comes back with other rows than were published
│   ├── GroupLive                 the group has live members; force, or stop them
│   ├── LimitReached              a principal has as many of them as it may have (retriable)
│   └── ShardUnknown              live brokers or programs were not given a shard's address; names them
├── AppendError                   a batch was not stored
│   ├── CorruptBatch              checksum or framing is wrong
│   ├── PartitionSealed           the partition takes no more batches; names its successors
│   ├── BacklogFull               the topic's limit on its backlog is reached (retriable)
│   ├── SequenceGap               an earlier batch of this producer is missing (retriable)
│   ├── UnknownProducer           a producer must start at sequence 0
│   ├── ProducerFenced            a newer epoch of this producer is in use
│   └── UnknownFate               it cannot be told whether the batch was stored
│       └── SendTimeout           the deadline passed before the receipt came; `stored=False` in its
│                                 details if the message never left
├── DeliveryError                 a delivery is not what its holder believes
│   ├── LeaseLost                 the lease ended; somebody else may have the message
│   ├── GateClosed                the group has not read all that comes before this partition (retriable)
│   └── GenerationChanged         the group was reset meanwhile (retriable)
├── RequestError                  a request was not answered as its requester wished
│   ├── NoReply                   no reply came in time; says whether anybody serves the topic
│   └── RequestFailed             the handler failed; `kind` is for machines
├── AccessError                   a served broker said no
│   ├── NotAuthenticated          no token, or one that nobody has
│   └── PermissionDenied          the principal lacks a permission; names the grant that is needed
├── ProtocolError                 what speaks there is not Postroom, or another version of it
└── StoreError                    the database said no
    ├── StoreUnavailable          cannot be opened or reached, or takes no writes (retriable)
    │   └── BrokerUnavailable     no broker of a served queue can be reached (retriable)
    ├── AccessDenied              wrong credentials, or rights are missing
    ├── StoreBusy                 locked for too long (retriable)
    ├── StoreFull                 no space left (retriable once there is space)
    ├── StoreCorrupt              not a database, damaged, or older than it was
    └── SchemaMismatch            made by a newer version or under the former name, or not migrated

`code` is stable and for machines; `retriable` says whether the very same call may succeed later.
"""

from __future__ import annotations

from typing import Any, ClassVar

__all__ = [
    "AccessDenied",
    "AccessError",
    "AppendError",
    "BacklogFull",
    "BrokerUnavailable",
    "CatalogError",
    "ClosedError",
    "CorruptBatch",
    "DataLoss",
    "DecodeError",
    "DeliveryError",
    "ForkError",
    "GateClosed",
    "GenerationChanged",
    "GroupConflict",
    "GroupExists",
    "GroupLive",
    "InvalidMessage",
    "InvalidName",
    "InvalidSetting",
    "InvalidURL",
    "LeaseLost",
    "LimitReached",
    "MessageTooLarge",
    "NoReply",
    "NotAuthenticated",
    "PartitionSealed",
    "PermissionDenied",
    "PostroomError",
    "PrincipalExists",
    "ProducerFenced",
    "ProtocolError",
    "RequestError",
    "RequestFailed",
    "RouteConflict",
    "SchemaMismatch",
    "SendTimeout",
    "SequenceGap",
    "ShardUnknown",
    "StagingConflict",
    "StoreBusy",
    "StoreCorrupt",
    "StoreError",
    "StoreFull",
    "StoreUnavailable",
    "TopicConflict",
    "TopicExists",
    "UnknownFate",
    "UnknownGroup",
    "UnknownPartition",
    "UnknownPrincipal",
    "UnknownProducer",
    "UnknownTask",
    "UnknownTopic",
    "UsageError",
    "shortened",
]


def shortened(text: object, most: int = 60) -> str:
    """What somebody sent, as an error may repeat it: in quotes, and not for long.

    >>> shortened("orders")
    "'orders'"
    >>> shortened("x" * 1000, 5)
    "'xxxxx…'"
    """
    if isinstance(text, str | bytes) and len(text) > most:
        return f"{text[:most]!r}"[:-1] + "…'"
    shown = repr(text)
    return shown if len(shown) <= 4 * most else f"{shown[:most]}…"


class PostroomError(Exception):
    """The root. `details` holds what a program may want to read (names, offsets, limits).

    A detail whose name begins with "_" does not leave the process. `_served` is the sentence for those who
    are served by a broker, if they cannot do what the message says.
    """

    code: ClassVar[str] = "error"
    retriable: ClassVar[bool] = False

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.details = details


class UsageError(PostroomError):
    code = "usage"


class InvalidURL(UsageError):
    code = "invalid_url"


class InvalidName(UsageError):
    code = "invalid_name"


class InvalidMessage(UsageError):
    code = "invalid_message"


class InvalidSetting(UsageError):
    code = "invalid_setting"


class MessageTooLarge(UsageError):
    code = "message_too_large"


class ClosedError(UsageError):
    code = "closed"


class ForkError(UsageError):
    code = "used_after_fork"


class DecodeError(UsageError):
    code = "decode"


class UnknownTask(DecodeError):
    code = "unknown_task"


class CatalogError(PostroomError):
    code = "catalog"


class UnknownTopic(CatalogError):
    code = "unknown_topic"


class TopicExists(CatalogError):
    code = "topic_exists"


class UnknownGroup(CatalogError):
    code = "unknown_group"


class GroupExists(CatalogError):
    code = "group_exists"


class TopicConflict(CatalogError):
    code = "topic_conflict"


class UnknownPartition(CatalogError):
    code = "unknown_partition"


class GroupConflict(CatalogError):
    code = "group_conflict"


class UnknownPrincipal(CatalogError):
    code = "unknown_principal"


class PrincipalExists(CatalogError):
    code = "principal_exists"


class DataLoss(CatalogError):
    code = "data_loss"


class RouteConflict(CatalogError):
    code = "route_conflict"
    retriable = True


class StagingConflict(CatalogError):
    code = "staging_conflict"


class GroupLive(CatalogError):
    code = "group_live"


class LimitReached(CatalogError):
    code = "limit_reached"
    retriable = True


class ShardUnknown(CatalogError):
    code = "shard_unknown"


class AppendError(PostroomError):
    code = "append"


class CorruptBatch(AppendError):
    code = "corrupt_batch"


class PartitionSealed(AppendError):
    code = "partition_sealed"


class BacklogFull(AppendError):
    code = "backlog_full"
    retriable = True


class SequenceGap(AppendError):
    code = "sequence_gap"
    retriable = True


class UnknownProducer(AppendError):
    code = "unknown_producer"


class ProducerFenced(AppendError):
    code = "producer_fenced"


class UnknownFate(AppendError):
    code = "unknown_fate"


class SendTimeout(UnknownFate):
    code = "send_timeout"


class DeliveryError(PostroomError):
    code = "delivery"


class LeaseLost(DeliveryError):
    code = "lease_lost"


class GateClosed(DeliveryError):
    code = "gate_closed"
    retriable = True


class GenerationChanged(DeliveryError):
    code = "generation_changed"
    retriable = True


class RequestError(PostroomError):
    code = "request"


class NoReply(RequestError):
    code = "no_reply"


class RequestFailed(RequestError):
    """Raised to a requester, or by a handler: then its requester gets it with this `kind` and sentence."""

    code = "request_failed"

    def __init__(self, message: str, *, kind: str = "", **details: Any) -> None:
        super().__init__(message, **({"kind": kind} if kind else {}), **details)

    @property
    def kind(self) -> str:
        return str(self.details.get("kind", "failed"))


class AccessError(PostroomError):
    code = "access"


class NotAuthenticated(AccessError):
    code = "not_authenticated"


class PermissionDenied(AccessError):
    code = "permission_denied"


class ProtocolError(PostroomError):
    code = "protocol"


class StoreError(PostroomError):
    code = "store"
    undone: bool = False  # its transaction was undone for a passing reason; the store runs the verb again
    nothing_done: bool = False  # its transaction surely changed nothing


class StoreUnavailable(StoreError):
    code = "store_unavailable"
    retriable = True


class BrokerUnavailable(StoreUnavailable):
    code = "broker_unavailable"


class AccessDenied(StoreError):
    code = "access_denied"


class StoreBusy(StoreError):
    code = "store_busy"
    retriable = True


class StoreFull(StoreError):
    code = "store_full"
    retriable = True


class StoreCorrupt(StoreError):
    code = "store_corrupt"


class SchemaMismatch(StoreError):
    code = "schema_mismatch"


# ---- install ----
# What to run to install an extra of Postroom, or a newer version: the words of every error that says so.
#
# There is no release yet: a name on the package index would be somebody else's package, or none. So both
# name a checkout, never the index.


def how_to_install(extra: str) -> str:
    """What to run for an extra (a name of `[project.optional-dependencies]`), as the end of a sentence."""
    return f"run `pip install '.[{extra}]'` in a checkout of Postroom"


def how_to_update() -> str:
    """What to run for a newer Postroom, as the end of a sentence."""
    return "update your checkout of Postroom and run `pip install .` in it"
