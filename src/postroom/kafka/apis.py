"""What of Kafka's protocol is served: which requests in which versions, and the error codes.

An API that is in the table is complete; one that is not is not advertised, and clients do without it. Ranges
have no gaps, from what old clients speak to what new ones do.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from ..errors import (
    AccessError,
    BacklogFull,
    BrokerUnavailable,
    CorruptBatch,
    InvalidName,
    InvalidSetting,
    LimitReached,
    MessageTooLarge,
    NotAuthenticated,
    PartitionSealed,
    PermissionDenied,
    PostroomError,
    ProducerFenced,
    SequenceGap,
    StoreError,
    TopicExists,
    UnknownFate,
    UnknownPartition,
    UnknownProducer,
    UnknownTopic,
    UsageError,
)

__all__ = ["APIS", "Api", "ApiVersions", "Code", "advertised", "code_of"]

_log = logging.getLogger("postroom.kafka")


@dataclass(frozen=True, slots=True)
class Api:
    key: int
    name: str  # in metrics, and of the handler
    lowest: int
    highest: int
    flexible: int  # from this version on
    advertised_from: int | None = None  # lower than what is served

    def serves(self, version: int) -> bool:
        return self.lowest <= version <= self.highest


_TABLE = (
    # librdkafka before 2.11 does not compress for a broker that lacks Produce 0
    Api(0, "produce", 3, 12, 9, advertised_from=0),
    Api(1, "fetch", 4, 17, 12),
    Api(2, "list_offsets", 1, 10, 6),
    Api(3, "metadata", 0, 13, 9),
    Api(8, "offset_commit", 2, 9, 8),
    Api(9, "offset_fetch", 1, 9, 6),
    Api(10, "find_coordinator", 0, 6, 3),
    Api(11, "join_group", 0, 9, 6),
    Api(12, "heartbeat", 0, 4, 4),
    Api(13, "leave_group", 0, 5, 4),
    Api(14, "sync_group", 0, 5, 4),
    Api(15, "describe_groups", 0, 5, 5),
    Api(16, "list_groups", 0, 5, 3),
    Api(17, "sasl_handshake", 0, 1, 99),
    Api(18, "api_versions", 0, 5, 3),
    Api(19, "create_topics", 2, 7, 5),
    Api(20, "delete_topics", 1, 6, 4),
    Api(21, "delete_records", 0, 2, 2),
    Api(22, "init_producer_id", 0, 5, 2),
    Api(32, "describe_configs", 1, 4, 4),
    Api(36, "sasl_authenticate", 0, 2, 2),
    Api(42, "delete_groups", 0, 2, 2),
    Api(44, "incremental_alter_configs", 0, 1, 1),
    Api(47, "offset_delete", 0, 0, 99),
    Api(60, "describe_cluster", 0, 2, 0),
    Api(76, "share_group_heartbeat", 1, 1, 0),
    Api(77, "share_group_describe", 1, 1, 0),
    Api(78, "share_fetch", 1, 2, 0),
    Api(79, "share_acknowledge", 1, 2, 0),
    Api(90, "describe_share_group_offsets", 0, 1, 0),
    Api(91, "alter_share_group_offsets", 0, 0, 0),
    Api(92, "delete_share_group_offsets", 0, 0, 0),
)

APIS = {api.key: api for api in _TABLE}
"""By the key of the request."""

ApiVersions = APIS[18]


def advertised() -> list[tuple[int, int, int]]:
    """Key, lowest and highest version of each API, as clients are told."""
    return [
        (api.key, api.lowest if api.advertised_from is None else api.advertised_from, api.highest)
        for api in _TABLE
    ]


class Code:
    """Kafka's error codes, those that are used."""

    NONE = 0
    UNKNOWN = -1
    OFFSET_OUT_OF_RANGE = 1
    UNKNOWN_TOPIC_OR_PARTITION = 3
    NOT_LEADER = 6
    REQUEST_TIMED_OUT = 7
    MESSAGE_TOO_LARGE = 10
    OFFSET_METADATA_TOO_LARGE = 12
    COORDINATOR_NOT_AVAILABLE = 15
    NOT_COORDINATOR = 16
    INVALID_TOPIC = 17
    INVALID_REQUIRED_ACKS = 21
    INCONSISTENT_GROUP_PROTOCOL = 23
    INVALID_GROUP_ID = 24
    UNKNOWN_MEMBER_ID = 25
    INVALID_SESSION_TIMEOUT = 26
    TOPIC_AUTHORIZATION_FAILED = 29
    GROUP_AUTHORIZATION_FAILED = 30
    CLUSTER_AUTHORIZATION_FAILED = 31
    UNSUPPORTED_SASL_MECHANISM = 33
    ILLEGAL_SASL_STATE = 34
    UNSUPPORTED_VERSION = 35
    TOPIC_ALREADY_EXISTS = 36
    INVALID_PARTITIONS = 37
    INVALID_CONFIG = 40
    INVALID_REQUEST = 42
    POLICY_VIOLATION = 44
    OUT_OF_ORDER_SEQUENCE = 45
    INVALID_PRODUCER_EPOCH = 47
    INVALID_TXN_STATE = 48
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED = 53
    SASL_AUTHENTICATION_FAILED = 58
    UNKNOWN_PRODUCER_ID = 59
    NON_EMPTY_GROUP = 68
    GROUP_ID_NOT_FOUND = 69
    FETCH_SESSION_NOT_FOUND = 70
    UNSUPPORTED_COMPRESSION = 76
    GROUP_MAX_SIZE_REACHED = 81
    GROUP_SUBSCRIBED_TO_TOPIC = 86
    THROTTLING_QUOTA_EXCEEDED = 89
    INVALID_RECORD = 87
    UNKNOWN_TOPIC_ID = 100
    FENCED_MEMBER_EPOCH = 110
    INVALID_RECORD_STATE = 121
    SHARE_SESSION_NOT_FOUND = 122
    INVALID_SHARE_SESSION_EPOCH = 123
    REBOOTSTRAP_REQUIRED = 129
    SHARE_SESSION_LIMIT_REACHED = 133


_CODES: tuple[tuple[type[PostroomError], int], ...] = (
    (UnknownTopic, Code.UNKNOWN_TOPIC_OR_PARTITION),
    (UnknownPartition, Code.UNKNOWN_TOPIC_OR_PARTITION),
    (TopicExists, Code.TOPIC_ALREADY_EXISTS),
    (PartitionSealed, Code.NOT_LEADER),
    (CorruptBatch, Code.INVALID_RECORD),  # CORRUPT_MESSAGE would be sent again and again
    (BacklogFull, Code.REQUEST_TIMED_OUT),  # which is sent again
    (SequenceGap, Code.OUT_OF_ORDER_SEQUENCE),
    (UnknownFate, Code.OUT_OF_ORDER_SEQUENCE),
    (UnknownProducer, Code.UNKNOWN_PRODUCER_ID),
    (ProducerFenced, Code.INVALID_PRODUCER_EPOCH),
    (MessageTooLarge, Code.MESSAGE_TOO_LARGE),
    (InvalidName, Code.INVALID_TOPIC),
    (InvalidSetting, Code.INVALID_CONFIG),
    (UsageError, Code.INVALID_REQUEST),
    (PermissionDenied, Code.TOPIC_AUTHORIZATION_FAILED),
    (NotAuthenticated, Code.SASL_AUTHENTICATION_FAILED),
    (AccessError, Code.CLUSTER_AUTHORIZATION_FAILED),
    (LimitReached, Code.POLICY_VIOLATION),
    (BrokerUnavailable, Code.REQUEST_TIMED_OUT),
    (StoreError, Code.REQUEST_TIMED_OUT),
)


def code_of(error: BaseException) -> int:
    """The code that tells a Kafka client what to do about an error; a fault of ours is logged."""
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    if not isinstance(error, PostroomError):
        _log.error("a request of a Kafka client failed in an unexpected way", exc_info=error)
    return Code.UNKNOWN
