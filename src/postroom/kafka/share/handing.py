"""What of a poll's reply goes to a consumer of a share group, and where it is for Kafka clients.

Messages of the group's own topics (retries from far away, redriven dead letters, the slow lane) come in a
partition of the topic too, at offsets beyond any that a log has: clients take offsets as they come, and hand
them back. What holds no message for the client is told apart: the seal of a partition (I18), offsets for
which no batch came, and what finds no room.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ...endpoint.values import Grant, Lease, PollReply, Settle, Verdict
from ...model.delivery.delivery import Span
from ...model.messages.batch import read_header
from ...model.share_session import Acquired, PartitionOf, ShareSession
from ...store.contract import StoredBatch
from ..reading import at_origin
from ..topics import KafkaTopic
from .answers import Sharing

__all__ = ["Handing", "Key", "WantedTopic", "handed", "parts_of"]

Key = tuple[str, int, int]
"""Of a delivery: topic, partition and token."""

_OWN_TOPICS_AT = 2**40  # offsets of the group's own topics begin there: a partition has so many at most
_OWN_PARTITIONS = 2**22


@dataclass(slots=True)
class WantedTopic:
    """A topic of a fetch, and where its partitions are for Kafka clients: index and origin."""

    view: KafkaTopic
    at: dict[int, tuple[int, int]] = field(default_factory=dict)  # by partition id
    first: int = -1  # the partition in which messages of the group's own topics come

    def add(self, index: int) -> bool:
        """It is to be read, too. False: there is no such partition."""
        chain = self.view.chain(index)
        if chain is None:
            return False
        self.first = index if self.first < 0 else min(index, self.first)
        self.at.update({link.partition_id: (index, link.origin) for link in chain.links})
        return True

    def located(self, grant: Grant) -> tuple[int, int] | None:
        """The index and the origin of what was handed out; None: there is no room for it."""
        if grant.topic == self.view.name:
            return self.at.get(grant.partition_id)
        fits = grant.partition_id < _OWN_PARTITIONS and all(x.last < _OWN_TOPICS_AT for x in grant.leases)
        return (self.first, (grant.partition_id + 1) * _OWN_TOPICS_AT) if fits else None


@dataclass(slots=True)
class Handing:
    """What a consumer was given, and what is not for it: to be settled at once, or looked after first."""

    acquired: list[tuple[PartitionOf, Acquired]] = field(default_factory=list)
    settled: list[tuple[Key, Verdict]] = field(default_factory=list)
    missing: list[tuple[Key, Span]] = field(default_factory=list)


def handed(
    session: ShareSession, topic: WantedTopic, token: int, reply: PollReply, answer: Sharing, until: int
) -> Handing:
    """Put what a poll was given into the answer, and into what the consumer has `until` then."""
    rest = Handing()
    for grant in reply.grants:
        key, found = (grant.topic, grant.partition_id, token), topic.located(grant)
        if found is None:
            rest.settled += [(key, Verdict("release", one.first, one.last)) for one in grant.leases]
            continue
        index, origin = found
        partition = answer.partition(topic.view.id, index)
        sent: dict[int, StoredBatch] = {}
        for lease in grant.leases:
            for first, last in _messages(lease, grant, sent, key, rest):
                partition.acquired.append((origin + first, origin + last, lease.attempt))
                one = Acquired(origin + first, origin + last, *key[:2], origin, token, lease.attempt, until)
                session.acquire((topic.view.id, index), one)
                rest.acquired.append(((topic.view.id, index), one))
        partition.pieces += [(origin + base, at_origin(origin, batch)) for base, batch in sent.items()]
    return rest


def _messages(
    lease: Lease, grant: Grant, sent: dict[int, StoredBatch], key: Key, rest: Handing
) -> Iterator[Span]:
    """Yield the offsets of a lease that hold messages, as long ranges; their batches are `sent`."""
    at = begun = lease.first
    for batch in grant.batches:
        first, last = max(at, batch.base_offset), min(lease.last, batch.last_offset)
        if first > last:
            continue
        control = read_header(batch.data).control
        if first > at or control:
            if begun < at:
                yield begun, at - 1
            begun = first
        if first > at:
            rest.missing.append((key, (at, first - 1)))
        if control:
            rest.settled.append((key, Verdict("ack", first, last)))
            begun = last + 1
        else:
            sent[batch.base_offset] = batch
        at = last + 1
    if begun < at:
        yield begun, at - 1
    if at <= lease.last:
        rest.missing.append((key, (at, lease.last)))


def parts_of(given: Iterable[tuple[Key, Verdict]]) -> list[Settle]:
    """What is settled, by delivery."""
    found: dict[Key, list[Verdict]] = {}
    for key, verdict in given:
        found.setdefault(key, []).append(verdict)
    return [Settle(*key, tuple(verdicts)) for key, verdicts in found.items()]
