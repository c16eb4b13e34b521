"""What consumers of share groups say of their messages, as verdicts of the group.

Accept is an ack, and so is a gap. Reject goes to the dead letters. Release is a retry, which counts as an
attempt, after a pause that grows with the attempts; renew extends the lease. What a consumer says of offsets
that it has not is refused, the rest is done. If the store cannot be asked, nothing is settled, and the lease
ends (I25).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, Literal

from ...broker.deliver.handed import ReadRelease
from ...broker.served import Servable
from ...config import WireTuning
from ...endpoint.values import Beat, Held, Verdict
from ...errors import PostroomError
from ...model.delivery.delivery import Span
from ...model.share_session import (
    Acknowledged,
    AckType,
    Acquired,
    InvalidAckError,
    ShareSession,
    acknowledged,
)
from ...model.topology.names import base_topic
from ..apis import Code, code_of
from ..topics import KafkaTopic
from .answers import SharedPartition, Sharing
from .handing import Key, parts_of

__all__ = ["Settling", "said_of"]

_log = logging.getLogger("postroom.kafka")

_RELEASED = "a Kafka client released it"
_REJECTED = "a Kafka client rejected it"


def said_of(partition: Any, answer: SharedPartition, *, renews: bool) -> list[Acknowledged]:
    """What a request says of a partition; if it makes no sense, the answer says so."""
    try:
        return acknowledged(
            ((b.first_offset, b.last_offset, b.acknowledge_types) for b in partition.acknowledgement_batches),
            renews=renews,
        )
    except InvalidAckError as wrong:
        answer.ack_error, answer.ack_message = Code.INVALID_REQUEST, str(wrong)
        return []


class Settling:
    """`now`: milliseconds, as those of sessions."""

    def __init__(self, broker: Servable, tuning: WireTuning) -> None:
        self._broker = broker
        self._release_ms, self._longest_ms = tuning.kafka_release_ms, tuning.kafka_longest_release_ms

    def delay_ms(self, attempt: int) -> int:
        """How long a message that was released waits before it comes again.

        The first time it does not, as with Kafka: whoever releases it may only want to give it away.
        """
        return 0 if attempt <= 1 else min(self._release_ms << min(attempt - 2, 20), self._longest_ms)

    async def settle(
        self,
        view: KafkaTopic,
        group: str,
        session: ShareSession,
        said: dict[int, list[Acknowledged]],
        answer: Sharing,
    ) -> list[tuple[int, Acquired]]:
        """Settle what is said of a topic, by partition; returns what is to be renewed."""
        given: list[tuple[Key, Verdict]] = []
        kept: list[tuple[int, Acquired]] = []
        of: dict[Key, SharedPartition] = {}
        for index, each in said.items():
            partition = answer.partition(view.id, index)
            for one in each:
                found, whole = session.settle((view.id, index), one)
                if not whole:
                    refuse(partition)
                of |= {_key(piece): partition for piece in found}
                if one.kind is AckType.RENEW:
                    kept += [(index, piece) for piece in found]
                else:
                    given += [(_key(piece), self._verdict(piece, one.kind)) for piece in found]
        try:
            reply = await self._broker.settle(view.name, group, parts_of(given)) if given else None
        except PostroomError as error:
            code_of(error)  # which logs what is a fault of ours
            for key, _ in given:
                of[key].ack_error, of[key].ack_message = Code.NOT_LEADER, str(error)
            return kept
        for part, _ in reply.lost if reply else ():
            refuse(of[part.topic, part.partition_id, part.token])
        for part in reply.away if reply else ():
            of[part.topic, part.partition_id, part.token].ack_error = Code.NOT_LEADER
        return kept

    def _verdict(self, one: Acquired, kind: AckType) -> Verdict:
        if kind is AckType.RELEASE:
            return _verdict(one, "retry", delay_ms=self.delay_ms(one.attempt), reason=_RELEASED)
        if kind is AckType.REJECT:
            return _verdict(one, "dead", reason=_REJECTED)
        return _verdict(one, "ack")

    async def renew(
        self,
        view: KafkaTopic,
        group: str,
        member: str,
        session: ShareSession,
        kept: Iterable[tuple[int, Acquired]],
        answer: Sharing,
        now: int,
    ) -> None:
        """Extend leases; what is somebody else's by now is answered for."""
        leases: dict[Key, list[Span]] = {}
        for _, one in kept:
            leases.setdefault(_key(one), []).append((one.first - one.origin, one.last - one.origin))
        each = tuple(Held(*key, tuple(spans)) for key, spans in leases.items())
        lost: set[Key] = set()
        if each:
            beat = Beat(view.name, group, member, "", each)
            try:
                found = await self._broker.in_thread(self._broker.beat, [beat])
                lost = {(one.topic, one.partition_id, one.token) for one, _ in found}
            except PostroomError as error:
                code_of(error)
                lost = set(leases)
        for index, one in kept:
            if _key(one) in lost:
                refuse(answer.partition(view.id, index))
            else:
                session.acquire((view.id, index), one.until_then(now + answer.lease_ms))

    async def give_back(self, group: str, each: Iterable[Acquired], *, sent: bool) -> None:
        """Give back what the consumer has no use for: it was no failure. `sent`: it may have read it, and
        whoever gets it next is not told that it is the first, as with Kafka."""
        kind = ReadRelease if sent else Verdict
        given: dict[str, list[tuple[Key, Verdict]]] = {}
        for one in each:
            verdict = kind("release", one.first - one.origin, one.last - one.origin)
            given.setdefault(base_topic(one.topic), []).append((_key(one), verdict))
        for topic, some in given.items():
            await self.quietly(topic, group, some)

    async def quietly(self, topic: str, group: str, given: Iterable[tuple[Key, Verdict]]) -> None:
        """Settle what no client waits for; if it cannot be done, the lease ends."""
        try:
            if parts := parts_of(given):
                await self._broker.settle(topic, group, parts)
        except PostroomError as error:
            _log.warning("messages of a share group wait for their lease to end: %s", error)


def refuse(partition: SharedPartition) -> None:
    partition.ack_error = Code.INVALID_RECORD_STATE
    partition.ack_message = "it is not this consumer's, or its lease has ended: it may be delivered again"


def _key(one: Acquired) -> Key:
    return one.topic, one.partition_id, one.token


def _verdict(
    one: Acquired, kind: Literal["ack", "retry", "dead"], *, delay_ms: int = 0, reason: str = ""
) -> Verdict:
    return Verdict(kind, one.first - one.origin, one.last - one.origin, delay_ms, reason=reason)
