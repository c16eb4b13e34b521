"""The one table of operations: whatever a queue can be asked has a row here, and nothing else can be asked.

A row says which number an operation has on the wire, what its request and its reply are, and which permission
it needs on which topics (R48). Whoever serves a queue (`wire.server`, `http`) asks the row what to check and
whom to tell; whoever asks one (`wire.client`) takes from it what is sent; metrics count by its name. So a new
operation is written here, with its request and its line in `Endpoint`; in the broker; and in the SDK.

Must never leave to a guess which topics a request is about: a row without an answer cannot be written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from ..model.access import ANONYMOUS, Need, Principal
from ..model.audit import AuditEntry
from ..model.delivery.delivery import Span
from ..model.messages.batch import TopicBounds
from ..model.messages.requests import ReplyTopic
from ..model.policy.slow_lane import LaneInfo, LaneView
from ..model.topology.names import reply_topic
from ..model.topology.route import Change, Route
from ..store.contract import Appended
from . import requests as r
from .values import (
    DeadLetters,
    Decided,
    DelayedBatch,
    Fetched,
    GroupInfo,
    Held,
    Lag,
    PollReply,
    PrincipalInfo,
    Published,
    RateInfo,
    ResetPlan,
    SettleReply,
    ShardInfo,
    StoppedMessage,
    TopicInfo,
)

__all__ = ["OPERATIONS", "Changed", "Operation", "operation_of"]

Topics: TypeAlias = Iterable[str | None]
"""Topics that a request is about; None: the queue as a whole."""


Changed: TypeAlias = Literal["topic", "group", "route", "shard", "rate", "progress", "messages"]
"""What an administrative operation changes: the audit log tells what it was like before and after."""


# ---- which topics ----


def _topic(request: Any, who: str) -> Topics:
    return (request.topic,)


def _name(request: Any, who: str) -> Topics:
    return (request.name,)


def _queue(request: Any, who: str) -> Topics:
    return (None,)


def _polled(request: r.Poll | r.Unpark, who: str) -> Topics:
    return (request.request.topic,)


def _settled(request: r.SettleParts, who: str) -> Topics:
    return dict.fromkeys((request.topic, *(part.topic for part in request.parts)))


def _settled_and_polled(request: r.SettleAndPoll, who: str) -> Topics:
    topics = (request.topic, request.request.topic, *(part.topic for part in request.parts))
    return dict.fromkeys(topics)


def _beaten(request: r.Beats, who: str) -> Topics:
    topics = ((beat.topic, *(held.topic for held in beat.held)) for beat in request.beats)
    return dict.fromkeys(topic for some in topics for topic in some)


def _limited(request: r.SetRate, who: str) -> Topics:
    return (request.rate.subject[0] or None,)  # a producer is of no topic


def _staged(request: r.Marks | r.Decide | r.Publish | r.Drop, who: str) -> Topics:
    return request.topics or (None,)


def _replies(request: r.Requester, who: str) -> Topics:
    return (reply_topic(request.client, who),)


# ---- who asks ----
# Arguments that a server adds to those of the request. Whoever may come without a token is as somebody
# inside: its own word counts.


def _nobody(principal: Principal) -> Mapping[str, Any]:
    return {}


def _owner(principal: Principal) -> Mapping[str, Any]:
    return {} if principal is ANONYMOUS else {"owner": principal.name}


def _producer(principal: Principal) -> Mapping[str, Any]:
    """Says whose producer it is, and whose rate it counts towards (R40)."""
    return {} if principal is ANONYMOUS else {"owner": principal.name, "producer": principal.name}


def _viewer(principal: Principal) -> Mapping[str, Any]:
    return {"viewer": principal}


def _requester(principal: Principal) -> Mapping[str, Any]:
    return {"owner": principal.name}


# ---- the table ----


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """One thing that a queue can be asked."""

    kind: int  # of its frames
    name: str  # the method of `Endpoint`
    request: type[r.Request]  # whose fields are the arguments of the method, but for the body
    reply: Any  # the type of what the method returns
    need: Need  # the permission that it takes, on each of its topics
    topics: Callable[[Any, str], Topics]  # that a request is about, if the principal of this name asks
    told: Callable[[Principal], Mapping[str, Any]] = _nobody  # what no client says itself: who asks (I23)
    body: str = ""  # the argument that follows the header: batches
    early: str = ""  # the argument that is called with the first part of an answer that comes in two
    early_reply: Any = None  # the type of that
    repeatable: bool = True  # if its answer was lost it may be asked again: nothing is done twice
    reads: bool = False  # and does nothing else
    waits: bool = False  # for messages, and does nothing meanwhile
    slow: bool = False  # its work may take long: a late answer is no sign that the broker is gone
    small: bool = False  # its answer is no larger than its request, or nearly nothing
    changes: Changed | None = None  # it is administrative: the audit log says what of this was changed


_TABLE = (
    # the log
    Operation(10, "append", r.Append, Appended, "send", _topic, _producer, body="batch", small=True),
    Operation(11, "fetch", r.Fetch, Fetched, "consume", _topic, reads=True, waits=True),
    Operation(12, "resolve", r.Resolve, dict[int, int], "consume", _topic, reads=True),
    Operation(13, "cancel", r.CancelDelayed, bool, "send", _topic, repeatable=False, small=True),
    # (repeated it would say that nothing was waiting)
    Operation(14, "bounds", r.BoundsOf, TopicBounds, "consume", _topic, reads=True),
    # deliveries
    Operation(20, "subscribe", r.Subscribe, GroupInfo, "consume", _topic),
    Operation(21, "unsubscribe", r.Unsubscribe, None, "consume", _topic, small=True),
    Operation(22, "poll", r.Poll, PollReply, "consume", _polled, waits=True),
    Operation(23, "settle", r.SettleParts, SettleReply, "consume", _settled, small=True),
    Operation(24, "hand_over", r.HandOver, None, "consume", _topic, small=True),
    Operation(25, "beat", r.Beats, list[tuple[Held, tuple[Span, ...]]], "consume", _beaten, small=True),
    Operation(26, "report_sources", r.Report, LaneView | None, "consume", _topic),
    Operation(27, "unpark", r.Unpark, PollReply, "consume", _polled),
    # topics; a list shows what `model.access.visible` leaves
    Operation(
        30, "create_topic", r.CreateTopic, TopicInfo, "manage", _name, repeatable=False, changes="topic"
    ),
    Operation(31, "topics", r.Nothing, list[TopicInfo], "none", _queue, _viewer, reads=True),
    Operation(32, "topic", r.Named, TopicInfo, "any", _name, reads=True),
    Operation(33, "alter_topic", r.AlterTopic, TopicInfo, "manage", _name, changes="topic"),
    Operation(
        34, "delete_topic", r.Named, None, "manage", _name, repeatable=False, small=True, changes="topic"
    ),
    Operation(35, "purge", r.Named, int, "manage", _name, repeatable=False, small=True, changes="messages"),
    # routes and shards
    Operation(40, "route", r.OfTopic, Route, "any", _topic, reads=True),
    Operation(41, "route_history", r.OfTopic, list[Route], "any", _topic, reads=True),
    Operation(42, "route_change", r.OfTopic, Change | None, "any", _topic, reads=True, small=True),
    Operation(43, "split", r.Split, Route, "manage", _topic, repeatable=False, changes="route"),
    Operation(44, "merge", r.Merge, Route, "manage", _topic, repeatable=False, changes="route"),
    Operation(45, "move", r.MoveTo, Route, "manage", _topic, repeatable=False, changes="route"),
    Operation(46, "shards", r.Nothing, list[ShardInfo], "manage", _queue, reads=True),
    Operation(47, "drain_shard", r.Named, ShardInfo, "manage", _queue, slow=True, changes="shard"),
    Operation(48, "open_shard", r.Named, ShardInfo, "manage", _queue, changes="shard"),
    # groups
    Operation(50, "create_group", r.OfGroup, GroupInfo, "manage", _topic, repeatable=False, changes="group"),
    Operation(51, "groups", r.OfTopic, list[GroupInfo], "any", _topic, reads=True),
    Operation(52, "alter_group", r.OfGroup, GroupInfo, "manage", _topic, changes="group"),
    Operation(53, "pause", r.Pause, GroupInfo, "manage", _topic, changes="group"),
    Operation(
        54,
        "delete_group",
        r.DeleteGroup,
        None,
        "manage",
        _topic,
        repeatable=False,
        small=True,
        changes="group",
    ),
    Operation(55, "reset", r.Reset, ResetPlan, "manage", _topic, repeatable=False, changes="progress"),
    Operation(56, "lag", r.LagOf, Lag, "any", _topic, reads=True),
    Operation(57, "lanes", r.LagOf, LaneInfo, "any", _topic, reads=True),
    # dead letters, and what stopped: who consumes could ack it as well
    Operation(60, "dead_letters", r.Letters, list[DeadLetters], "consume", _topic, reads=True),
    Operation(
        61, "redrive", r.Spots, int, "consume", _topic, repeatable=False, small=True, changes="messages"
    ),
    Operation(
        62, "discard", r.Spots, int, "manage", _topic, repeatable=False, small=True, changes="messages"
    ),
    Operation(63, "stopped", r.StoppedOf, list[StoppedMessage], "consume", _topic, reads=True),
    Operation(
        64,
        "restart_stopped",
        r.Spots,
        int,
        "consume",
        _topic,
        repeatable=False,
        small=True,
        changes="messages",
    ),
    Operation(
        65, "skip_stopped", r.Spots, int, "consume", _topic, repeatable=False, small=True, changes="messages"
    ),
    Operation(
        66, "drop_stopped", r.Spots, int, "consume", _topic, repeatable=False, small=True, changes="messages"
    ),
    # limits
    Operation(70, "set_rate", r.SetRate, None, "manage", _limited, small=True, changes="rate"),
    Operation(71, "rates", r.Nothing, list[RateInfo], "manage", _queue, reads=True),
    # staging
    Operation(80, "stage", r.Stage, None, "send", _topic, _producer, body="data", small=True),
    Operation(81, "staged_marks", r.Marks, dict[str, int], "send", _staged, _owner, reads=True, small=True),
    Operation(82, "decide_staged", r.Decide, Decided, "send", _staged, _owner, small=True),
    Operation(83, "publish_staged", r.Publish, Published, "send", _staged, _owner, small=True),
    Operation(84, "drop_staged", r.Drop, int, "send", _staged, _owner, small=True),
    # replies
    Operation(90, "open_replies", r.Requester, ReplyTopic, "consume", _replies, _requester, small=True),
    Operation(91, "close_replies", r.Requester, None, "consume", _replies, _requester, small=True),
    # administration
    Operation(100, "audit_log", r.AuditLog, list[AuditEntry], "manage", _queue, reads=True),
    Operation(101, "principals", r.Nothing, list[PrincipalInfo], "manage", _queue, reads=True),
    # what is due later: who consumes will read it
    Operation(110, "delayed", r.DelayedOf, list[DelayedBatch], "consume", _topic, reads=True),
    # groups that change sides
    Operation(
        130, "convert_group", r.Convert, ResetPlan, "manage", _topic, repeatable=False, changes="group"
    ),
    # two at once
    Operation(
        140,
        "settle_and_poll",
        r.SettleAndPoll,
        PollReply,
        "consume",
        _settled_and_polled,
        waits=True,
        early="settled",
        early_reply=SettleReply,
    ),
)

OPERATIONS: Mapping[str, Operation] = {operation.name: operation for operation in _TABLE}
"""By the name of the method of `Endpoint`."""

_BY_KIND = {operation.kind: operation for operation in _TABLE}


def operation_of(kind: int) -> Operation | None:
    """The operation whose frames have this kind; None: there is none."""
    return _BY_KIND.get(kind)
