"""Checks of what is stored: can every batch be read, checksum and records?

Looks at the newest messages of each partition and at some others, for a few seconds; or, if asked, at all.
Through a connection of its own, so that it works on a served queue as well. Must change nothing.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...address import Address
from ...client.databases import opening_of
from ...client.forward.outbox import Outbox
from ...client.forward.outbox_table import NAME, OutboxStatus
from ...config import DEFAULTS
from ...errors import (
    CorruptBatch,
    PermissionDenied,
    PostroomError,
    SchemaMismatch,
    StoreUnavailable,
    UnknownPartition,
    UnknownTopic,
)
from ...model.messages.batch import stored_records
from ...model.topology.route import Range
from ...units import format_duration
from ..framework.show import dead_letters, messages
from ..messages.dead import dead_letter_count
from . import Finding

if TYPE_CHECKING:
    from postroom import Connection, GroupInfo, Lag, TopicInfo

    from ...address import Address
    from ...store.contract import StoredBatch
    from ...wire.messages import Welcome

__all__ = ["check_batches", "check_brokers", "check_groups", "check_outbox"]


_SECONDS = 5.0  # for the quick look
_NEWEST = 1000  # messages of each partition
_SAMPLES = 3  # further places in each
_BYTES = 1024 * 1024  # read at once
_SHOWN = 5
_ADVICE = (
    "check the disk and its cables, and restore from a backup if the messages matter; groups go past such a "
    "batch and keep its bytes as a dead letter"
)

_Place = tuple[str, Range]
Begin = Callable[[str, int], None]
"""Told which topic begins, and how many there are in all."""


@dataclass(slots=True)
class _Looked:
    places: int = 0
    batches: int = 0
    unreadable: int = 0
    said: list[str] = field(default_factory=list)  # of some of these: where, and why
    forbidden: set[str] = field(default_factory=set)
    left_out: int = 0  # topics: there was no time


async def check_batches(mq: Connection, begin: Begin, *, deep: bool = False) -> list[Finding]:
    topics = [topic.name for topic in await mq.topics(internal=True)]
    random.shuffle(topics)
    looked, until = _Looked(), time.monotonic() + _SECONDS
    for number, topic in enumerate(topics):
        if not deep and time.monotonic() >= until:
            looked.left_out = len(topics) - number
            break
        begin(f"batches of {topic}", len(topics))
        try:
            for piece in (await mq.route(topic)).partitions:
                await _look(mq, (topic, piece), looked, deep)
                looked.places += 1
        except PermissionDenied:
            looked.forbidden.add(topic)
        except (UnknownTopic, UnknownPartition):
            pass  # it was deleted meanwhile
    return _found(looked, deep)


async def _look(mq: Connection, place: _Place, looked: _Looked, deep: bool) -> None:
    start, end = await _bounds(mq, place)
    newest = start if deep else max(start, end - _NEWEST)
    samples = [random.randrange(start, newest) for _ in range(_SAMPLES)] if newest > start else []
    seen: set[int] = set()
    for first in (newest, *samples):
        async for batch in _batches(mq, place, first, end, all_of_it=first == newest):
            if deep or batch.base_offset not in seen:
                _open(place, batch, looked)
            if not deep:
                seen.add(batch.base_offset)


def _open(place: _Place, batch: StoredBatch, looked: _Looked) -> None:
    looked.batches += 1
    try:
        stored_records(batch)
    except CorruptBatch as error:
        where = f"{place[0]}:{place[1].partition}:{batch.base_offset}"
        looked.unreadable += 1
        if looked.unreadable <= _SHOWN:
            looked.said.append(f"{where} ({batch.records} messages): {error}")


async def _bounds(mq: Connection, place: _Place) -> tuple[int, int]:
    fetched = await mq._endpoint.fetch(
        place[0], place[1].partition_id, 0, max_messages=1, max_bytes=1, wait_ms=0
    )
    return fetched.start, fetched.end


async def _batches(
    mq: Connection, place: _Place, offset: int, end: int, *, all_of_it: bool
) -> AsyncIterator[StoredBatch]:
    topic, piece = place
    while offset < end:
        fetched = await mq._endpoint.fetch(
            topic, piece.partition_id, offset, max_messages=_NEWEST, max_bytes=_BYTES, wait_ms=0
        )
        for batch in fetched.batches:
            yield batch
        if not fetched.batches or not all_of_it:
            return
        offset = fetched.batches[-1].last_offset + 1


def _found(looked: _Looked, deep: bool) -> list[Finding]:
    found = []
    if looked.forbidden:
        said = f"{len(looked.forbidden)} topics may not be read by this token"
        found.append(Finding("batches", "skip", said, "use one with `consume` or `admin` on them"))
    if looked.unreadable:
        more = f"; and {looked.unreadable - _SHOWN:,} more" if looked.unreadable > _SHOWN else ""
        said = f"{looked.unreadable:,} cannot be read: {'; '.join(looked.said)}{more}"
        return [*found, Finding("batches", "fail", said, _ADVICE)]
    what = "all" if deep else "the newest and a sample; --deep reads all"
    said = f"{looked.batches:,} in {looked.places:,} partitions can be read ({what})"
    if looked.left_out:
        said += f"; there was no time for {looked.left_out:,} topics"
    return [*found, Finding("batches", "ok", said)]


# ---- checks of topics and groups: who uses them, and which of them hold messages for nobody (R44) ----
# Built on the public API, through a connection of its own.


async def check_groups(mq: Connection) -> list[Finding]:
    members, groups, found = 0, 0, list[Finding]()
    for topic in await mq.topics():
        for group in await mq.groups(topic.name):
            groups += 1
            members += len(group.members)
            found += _group_found(topic, group, await mq.lag(topic.name, group.name))
            if dead := await dead_letter_count(mq, topic.name, group.name):
                found.append(_dead_found(topic.name, group.name, dead))
    return [Finding("members", "ok", f"{members} live in {groups} groups"), *found]


def _dead_found(topic: str, group: str, count: int) -> Finding:
    which = f"{topic} {group}"
    advice = (
        f"`postroom dead list {which} --by-error` shows why; mend it, then "
        f"`postroom dead redrive {which}`, or `discard` them"
    )
    said = f"group {group} of topic {topic} has {dead_letters(count)}"
    return Finding("dead letters", "warn", said, advice)


def _group_found(topic: TopicInfo, group: GroupInfo, lag: Lag) -> list[Finding]:
    found, waiting = [], lag.total.messages
    idle = "" if group.idle_ms is None else f" for {format_duration(group.idle_ms)}"
    if group.settings.mode == "broadcast" and "@" not in group.name:
        return []  # its members are groups of their own
    delete = f"`postroom group delete {topic.name} {group.name}`"
    if waiting and not group.members:
        kept = " and keeps them from being dropped" if topic.settings.keep == "needed" else ""
        said = (
            f"group {group.name} of topic {topic.name} has no members{idle}, holds {messages(waiting)}{kept}"
        )
        found.append(Finding("idle group", "warn", said, f"start its consumer, or {delete}"))
    elif group.idle_ms is not None and group.idle_ms > DEFAULTS.tuning.cli.idle_group_ms:
        said = f"group {group.name} of topic {topic.name} was not used{idle}"
        advice = f"{delete}, or let it go by itself: `postroom group alter … --expires 7d`"
        found.append(Finding("unused group", "warn", said, advice))
    if lag.total.stopped:
        oldest = format_duration(lag.total.stopped_age_ms)
        said = (
            f"group {group.name} of topic {topic.name} has {messages(lag.total.stopped)} stopped, the oldest "
            f"key waits for {oldest}"
        )
        place = f"{topic.name} {group.name}"
        advice = (
            f"`postroom stopped list {place}` shows why; mend it, then `postroom stopped restart {place} "
            "--all`, or let the keys go on with `skip` or `drop`"
        )
        found.append(Finding("stopped", "warn", said, advice))
    return found


# ---- checks of outboxes: what waits in them, for how long, and why (R30, R43) ----
# One in the queue's own database is found by itself, if it has the usual name; others are named with
# their address. Must change nothing, and must never make a file that is not there.


def check_outbox(address: Address, table: str = NAME, *, named: bool = True) -> list[Finding]:
    """`named`: somebody has asked for it, so it has to be there."""
    try:
        status = _outbox_look(address, Outbox(table))
    except SchemaMismatch as error:
        if not named and error.details.get("missing"):
            return []
        return [Finding("outbox", "fail", str(error))]
    except Exception as error:
        return [Finding("outbox", "fail", f"could not be checked: {error}")] if named else []
    return _outbox_found(status)


def _outbox_look(address: Address, outbox: Outbox) -> OutboxStatus:
    if address.path is not None and not address.path.exists():
        raise StoreUnavailable(f"there is no file {address.path}")
    connection = opening_of(address)()
    try:
        status: OutboxStatus = outbox.status(connection)
        return status
    finally:
        connection.close()


def _outbox_found(status: OutboxStatus) -> list[Finding]:
    found = []
    waiting = f"{messages(status.messages)} in {status.table}"
    for one in status.stuck:
        said = (
            f"{status.table}: nothing can be sent to topic {one.topic} for {format_duration(one.since_ms)}: "
        )
        advice = "mend that: it is tried again by itself; nothing is dropped, and other topics go on"
        found.append(Finding("outbox stuck", "warn", said + one.reason, advice))
    if status.messages and not status.relay:
        advice = "start one: `async with outbox.relay(mq, connect)`, or app.outbox(outbox, connect)"
        found.append(Finding("outbox relay", "warn", f"{waiting}, and no relay sends them", advice))
    elif status.oldest_age_ms > DEFAULTS.tuning.cli.old_outbox_ms and not status.stuck:
        said = f"{waiting}, the oldest for {format_duration(status.oldest_age_ms)}"
        advice = "look at the log of the process that relays: the queue may be away, or slow"
        found.append(Finding("outbox old", "warn", said, advice))
    return found or [Finding("outbox", "ok", f"{waiting}")]


# ---- checks of served brokers: who answers, who else is there, and whether their clock is ours ----

_SET_CLOCKS = (
    "delayed messages, schedules and retention go by the queue's; set the clocks of this machine, of the "
    "brokers and of the database by NTP"
)


async def check_brokers(address: Address) -> list[Finding]:
    """Check the brokers that the address names, then those that they know of."""
    found: list[Finding] = []
    told: dict[str, str] = {}  # address of others by the broker's id
    known: set[str] = set()
    for place in address.brokers:
        welcome, finding = await _greeted(place, "fail")
        found.append(finding)
        if welcome is not None:
            found += _clock(welcome, place)
            known.add(welcome.broker)
            told.update((one.id, one.address) for one in welcome.brokers)
    for id, place in told.items():
        if id not in known:
            found.append((await _greeted(place, "warn"))[1])
    return found


async def _greeted(place: str, bad: str) -> tuple[Welcome | None, Finding]:
    from ...client.credentials import by_environment
    from ...wire.client.link import connect
    from ...wire.messages import MAX_VERSION, MIN_VERSION, Hello

    way = by_environment()
    hello = Hello(MIN_VERSION, MAX_VERSION, "postroom doctor", way.token)
    began = time.perf_counter()
    try:
        link = await connect(place, hello, way.tls, timeout_ms=DEFAULTS.tuning.cli.broker_answer_ms)
    except PostroomError as error:
        advice = "" if bad == "fail" else "clients that are told of it cannot reach it: see --advertise"
        return None, Finding(f"broker {place}", "fail" if bad == "fail" else "warn", str(error), advice)
    took_ms = (time.perf_counter() - began) * 1000
    await link.close()
    await asyncio.sleep(0)
    said = f"answers within {took_ms:.0f} ms as version {link.welcome.version}, to {link.welcome.principal}"
    return link.welcome, Finding(f"broker {place}", "ok", said)


def _clock(welcome: Welcome, place: str) -> list[Finding]:
    ahead_ms = welcome.now_ms - time.time_ns() // 1_000_000
    if abs(ahead_ms) <= DEFAULTS.tuning.cli.broker_clock_ms:
        return []
    said = f"the clock of the queue is {ahead_ms / 1000:+.1f} s from this machine's"
    return [Finding(f"clock {place}", "warn", said, _SET_CLOCKS)]
