"""How long a name or a list of a request may be, and how large a number: the types that say so.

Whoever decodes a request (`endpoint.requests`) refuses what is beyond them before anybody looks at it. They
bound what a stranger can make a broker keep, compare, list or add up; what a name or a setting may be within
them is said by `topology.names` and `settings`. A sum of a few of these numbers fits into 64 bits.

Every text, list and number of a request has one of these types; a test walks through all of them.
"""

from __future__ import annotations

from itertools import islice
from typing import Annotated, Any, TypeAlias

from msgspec import Meta

__all__ = [
    "MOST_MOMENTS_MS",
    "MOST_PARTITIONS",
    "MOST_PARTS",
    "MOST_SEGMENTS",
    "MOST_SPANS",
    "MOST_SPOTS",
    "MOST_TOPICS",
    "AnyGroupName",
    "ClientName",
    "Count",
    "GroupName",
    "HeaderName",
    "Ids",
    "KafkaConfigs",
    "Key",
    "Label",
    "Long",
    "MemberName",
    "MessageId",
    "Millis",
    "Moment",
    "Number",
    "Offset",
    "PartitionId",
    "PartitionIds",
    "Position",
    "Positions",
    "RateName",
    "Reason",
    "ShardName",
    "Size",
    "Spans",
    "SpotList",
    "StartOffsets",
    "Token",
    "TopicName",
    "TopicNames",
    "Whole",
    "make_room",
]


MOST_MOMENTS_MS = 253_402_300_799_999  # the end of the year 9999
MOST_PARTITIONS = 4096  # that one request names
MOST_SPANS = 10_000  # of one delivery, and verdicts on it
MOST_PARTS = 1000  # deliveries in one request
MOST_SPOTS = 10_000
MOST_SEGMENTS = 10_000  # of a batch that a job stages; and partitions of its source
MOST_TOPICS = 1000  # that one request names
_MOST_MESSAGES = 10_000  # of a batch
_LARGEST = 2**63 - 1

# ---- names ----

TopicName: TypeAlias = Annotated[
    str, Meta(max_length=250)
]  # a topic's own has 120 at most, a group's own more
GroupName: TypeAlias = Annotated[str, Meta(max_length=60)]  # with the member of a broadcast group
AnyGroupName: TypeAlias = Annotated[str, Meta(max_length=249)]  # also one of Kafka clients
MemberName: TypeAlias = Annotated[str, Meta(max_length=120)]
ClientName: TypeAlias = Annotated[str, Meta(max_length=250)]
ShardName: TypeAlias = Annotated[str, Meta(max_length=120)]
RateName: TypeAlias = Annotated[str, Meta(max_length=330)]
Label: TypeAlias = Annotated[str, Meta(max_length=120)]  # of a query, a segment, a source
HeaderName: TypeAlias = Annotated[str, Meta(max_length=120)]
MessageId: TypeAlias = Annotated[str, Meta(max_length=4096)]
Reason: TypeAlias = Annotated[str, Meta(max_length=20_000)]  # it is cut to fewer when it is stored
Key: TypeAlias = Annotated[bytes, Meta(max_length=32 * 1024)]
Ids: TypeAlias = Annotated[bytes, Meta(max_length=16 * _MOST_MESSAGES)]

# ---- numbers ----

Long: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=_LARGEST)]  # what a database can keep
Whole: TypeAlias = Annotated[int, Meta(ge=0, le=_LARGEST)]
Number: TypeAlias = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]  # that people choose
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]  # of messages
Size: TypeAlias = Annotated[int, Meta(ge=0, le=2**60)]  # in bytes
Millis: TypeAlias = Annotated[int, Meta(ge=0, le=MOST_MOMENTS_MS)]
Moment: TypeAlias = Annotated[int, Meta(ge=0, le=MOST_MOMENTS_MS)]  # in milliseconds since 1970
Offset: TypeAlias = Annotated[int, Meta(ge=0, le=2**62)]
Position: TypeAlias = Annotated[int, Meta(ge=-1, le=2**62)]  # an offset, or -1: there is none
PartitionId: TypeAlias = Annotated[int, Meta(ge=0, le=_LARGEST)]
Token: TypeAlias = Annotated[int, Meta(ge=1, le=_LARGEST)]  # 0 is nobody's

# ---- lists ----

Spans: TypeAlias = Annotated[tuple[tuple[Offset, Offset], ...], Meta(max_length=MOST_SPANS)]
SpotList: TypeAlias = Annotated[tuple[tuple[PartitionId, Offset], ...], Meta(max_length=MOST_SPOTS)]
Positions: TypeAlias = Annotated[tuple[tuple[PartitionId, Position], ...], Meta(max_length=MOST_PARTITIONS)]
StartOffsets: TypeAlias = Annotated[tuple[tuple[Long, Long], ...], Meta(max_length=10_000)]
PartitionIds: TypeAlias = Annotated[tuple[PartitionId, ...], Meta(max_length=MOST_PARTITIONS)]
KafkaConfigs: TypeAlias = Annotated[tuple[tuple[Label, Label], ...], Meta(max_length=100)]
TopicNames: TypeAlias = Annotated[tuple[TopicName, ...], Meta(max_length=MOST_TOPICS)]


# ---- room in what is remembered: a cache that is keyed by what clients name must not grow for ever ----
# Decides which entries go; never whether something is true, so it is for caches alone: whatever goes is
# looked up again.


def make_room(known: dict[Any, Any], most: int) -> None:
    """Before one more is put there: if it is full, the older half goes.

    >>> known = {1: "a", 2: "b", 3: "c", 4: "d"}
    >>> make_room(known, 4)
    >>> known
    {3: 'c', 4: 'd'}
    """
    if len(known) < most:
        return
    try:
        oldest = list(islice(known, len(known) // 2))
    except RuntimeError:  # another thread has put something there just now: it is the next one's turn
        return
    for key in oldest:
        known.pop(key, None)
