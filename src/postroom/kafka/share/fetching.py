"""ShareFetch and ShareAcknowledge: what a consumer of a share group is handed out, and what it says of it.

A fetch is a poll of the group, as native members do it: the lease is the group's, the delivery count is the
attempt, and batches are sent whole, unopened, beside the offsets that are acquired. A consumer that falls
silent settles nothing: its leases end (I14). One that closes its session gives back what it has, which is no
failure; but the next delivery is not its first, as with Kafka.

Must never forget an offset that it was given. Whatever a request names is bounded before it is looked up
(I22).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID

from ...broker.deliver.handed import PartialPoll
from ...broker.served import Servable
from ...config import DEFAULTS
from ...endpoint.values import PollReply, Verdict, released
from ...errors import PostroomError, UnknownGroup
from ...model.share_session import CLOSES, OPENS, Acquired, PartitionOf, ShareSession
from ...model.topology.names import share_group
from ..apis import Code, code_of
from ..topics import KafkaTopic, Topics
from .answers import Sharing
from .handing import Handing, WantedTopic, handed
from .sessions import ShareError, ShareSessions, Who
from .settling import Settling, said_of

__all__ = ["ShareDeliveries", "check_group", "check_member"]

_MOST_PARTITIONS = 10_000  # of a session
_MOST_IN_FLIGHT = 10_000  # offsets that one consumer has acquired
_LONGEST_NAME = 249
_LONGEST_MEMBER = 120
_TOPICS_AT_ONCE = 250  # that one fetch polls; the others come next
_STRICT = 1  # acquire mode: no message more than was asked for

_Ended = tuple[WantedTopic, PartialPoll, PollReply | PostroomError]


def check_group(name: str | None) -> str:
    if not 0 < len(name or "") <= _LONGEST_NAME:
        raise ShareError(Code.INVALID_GROUP_ID, f"a group's name has 1 to {_LONGEST_NAME} characters")
    return name or ""


def check_member(member: str | None) -> str:
    if not 0 < len(member or "") <= _LONGEST_MEMBER or not (member or "").isprintable():
        raise ShareError(
            Code.INVALID_REQUEST, f"a member's name has 1 to {_LONGEST_MEMBER} printable characters"
        )
    return member or ""


class ShareDeliveries:
    """The requests of one connection. `permit`: operation and topic; `who`: the client's principal."""

    def __init__(
        self,
        broker: Servable,
        topics: Topics,
        sessions: ShareSessions,
        settling: Settling,
        permit: Callable[[str, str], None],
        who: Callable[[], str],
    ) -> None:
        self._broker, self._topics, self._sessions = broker, topics, sessions
        self._permit, self._who = permit, who
        self._settling = settling
        self._polled = 0  # each time another topic comes first
        self._returning: set[asyncio.Future[None]] = set()  # what is given back just now

    # ---- requests ----

    async def fetch(self, request: Any, most_bytes: int, fits: Callable[[int], bool]) -> Sharing:
        """What there is for a consumer, after what it says of what it had. `fits`: an answer of that size."""
        answer = Sharing(DEFAULTS.lease_ms)
        try:
            who = self._named(request)
            if request.share_session_epoch == OPENS and _acknowledges(request):
                raise ShareError(Code.INVALID_REQUEST, "a request that opens a session acknowledges nothing")
            session = self._sessions.begin(who, request.share_session_epoch, opens=True)
            _change_partitions(session, request, answer)
            if request.share_session_epoch != CLOSES:
                self._sessions.check_partitions(who)
            await self._acknowledge(who, session, request, answer)
            if request.share_session_epoch == CLOSES:
                await self._settling.give_back(share_group(who[1]), session.drained(), sent=True)
            elif request.max_records > 0 and not getattr(request, "is_renew_ack", False):
                await self._hand_out(who, session, request, answer, most_bytes, fits)
        except ShareError as error:
            return Sharing(answer.lease_ms, error.code, error.message)
        return answer

    async def acknowledge(self, request: Any) -> Sharing:
        answer = Sharing(DEFAULTS.lease_ms)
        try:
            who = self._named(request)
            session = self._sessions.begin(who, request.share_session_epoch, opens=False)
            await self._acknowledge(who, session, request, answer)
            if request.share_session_epoch == CLOSES:
                await self._settling.give_back(share_group(who[1]), session.drained(), sent=True)
        except ShareError as error:
            return Sharing(answer.lease_ms, error.code, error.message)
        return answer

    def _named(self, request: Any) -> Who:
        if len(request.topics) + sum(len(one.partitions) for one in request.topics) > 2 * _MOST_PARTITIONS:
            raise ShareError(Code.INVALID_REQUEST, f"name at most {_MOST_PARTITIONS:,} partitions")
        return self._who(), check_group(request.group_id), check_member(request.member_id)

    async def _acknowledge(self, who: Who, session: ShareSession, request: Any, answer: Sharing) -> None:
        renews = getattr(request, "is_renew_ack", False)
        for topic in request.topics:
            spoken = [one for one in topic.partitions if one.acknowledgement_batches]
            if not spoken:
                continue
            view, error, message = await self._view("settle", topic.topic_id)
            said = {}
            for one in spoken:
                partition = answer.partition(topic.topic_id, one.partition_index)
                partition.named, partition.ack_error, partition.ack_message = True, error, message
                if view is not None:
                    said[one.partition_index] = said_of(one, partition, renews=renews)
            if view is not None:
                group = share_group(who[1])
                kept = await self._settling.settle(view, group, session, said, answer)
                now = self._sessions.now()
                await self._settling.renew(view, group, who[2], session, kept, answer, now)

    async def _view(self, operation: str, id: UUID | None) -> tuple[KafkaTopic | None, int, str | None]:
        """The topic, if the client may do so to it; else the code, and why."""
        try:
            view = await self._topics.by_id(id)
            self._permit(operation, view.name)
            return view, 0, None
        except PostroomError as error:
            code = code_of(error)
            unknown = code == Code.UNKNOWN_TOPIC_OR_PARTITION
            return None, Code.UNKNOWN_TOPIC_ID if unknown else code, str(error)

    # ---- handing out ----

    async def _hand_out(
        self,
        who: Who,
        session: ShareSession,
        request: Any,
        answer: Sharing,
        most_bytes: int,
        fits: Callable[[int], bool],
    ) -> None:
        loop = asyncio.get_running_loop()
        wait_ms = min(max(request.max_wait, 0), DEFAULTS.poll_wait_ms)
        deadline = loop.time() + wait_ms / 1000
        wanted = await self._wanted(session, answer)
        if not wanted:
            return
        given: list[tuple[PartitionOf, Acquired]] = []
        if request.max_bytes > 0 and session.in_flight < _MOST_IN_FLIGHT and self._sessions.has_room(who):
            asked = self._polls(who, session, request, wanted, most_bytes, wait_ms)
            for topic, poll, reply in await self._first(asked):
                if isinstance(reply, PostroomError):
                    self._refuse(answer, topic, reply)
                    continue
                until = self._sessions.now() + reply.lease_ms
                answer.lease_ms = min(answer.lease_ms, reply.lease_ms) if answer.size else reply.lease_ms
                rest = handed(session, topic, poll.token, reply, answer, until)
                given += rest.acquired
                self._sessions.count(who)
                await self._account_for(topic, poll.group, rest)
        if not fits(answer.size):  # it asks again
            for partition, one in given:
                session.give_up(partition, one)
            await self._settling.give_back(share_group(who[1]), [one for _, one in given], sent=False)
            answer.emptied()
        elif not answer.told():  # what it has is to be settled first (I14), and it asks on and on
            await asyncio.sleep(max(0.0, deadline - loop.time()))

    async def _wanted(self, session: ShareSession, answer: Sharing) -> list[WantedTopic]:
        """The topics of a session, without the partitions that are wrong: the answer says what is."""
        found: dict[UUID | None, WantedTopic | tuple[int, str | None]] = {}
        for id, index in session.partitions:
            if id not in found:
                view, error, message = await self._view("poll", id)
                found[id] = (error, message) if view is None else WantedTopic(view)
            wanted = found[id]
            if isinstance(wanted, WantedTopic):
                if wanted.add(index):
                    continue
                wanted = (Code.UNKNOWN_TOPIC_OR_PARTITION, "there is no such partition: ask for the metadata")
            partition = answer.partition(id, index)
            partition.error, partition.message = wanted
        return [one for one in found.values() if isinstance(one, WantedTopic) and one.first >= 0]

    def _polls(
        self,
        who: Who,
        session: ShareSession,
        request: Any,
        wanted: Sequence[WantedTopic],
        most_bytes: int,
        wait_ms: int,
    ) -> list[tuple[WantedTopic, PartialPoll]]:
        """A poll for each topic. If no more than so many messages may come, they share that, in turn."""
        messages = min(request.max_records, _MOST_IN_FLIGHT - session.in_flight)
        strict = getattr(request, "share_acquire_mode", 0) == _STRICT
        self._polled += 1
        at = self._polled % len(wanted)
        chosen = [*wanted[at:], *wanted[:at]][: min(_TOPICS_AT_ONCE, messages if strict else len(wanted))]
        each = max(1, messages // len(chosen)) if strict else messages
        size = max(1, min(request.max_bytes, most_bytes) // len(chosen))
        return [
            (
                topic,
                PartialPoll(
                    topic.view.name, share_group(who[1]), who[2], secrets.randbits(63) | 1, each, size,
                    wait_ms, empty_handed=not session.in_flight, lane_messages=each,
                    only=frozenset(topic.at), whole=not strict,
                ),
            )
            for topic in chosen
        ]  # fmt: skip

    async def _first(self, asked: Sequence[tuple[WantedTopic, PartialPoll]]) -> list[_Ended]:
        """The replies of the first polls that were given something; the others end, and take nothing."""
        tasks = [asyncio.ensure_future(self._broker.poll(poll)) for _, poll in asked]
        pending = set(tasks)
        try:
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                if any(_was_given(one) for one in done):
                    break
            for one in pending:
                one.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        except asyncio.CancelledError:  # the client is gone
            for (_, poll), one in zip(asked, tasks, strict=True):
                if not one.cancel() and _was_given(one):
                    self._give_back(poll, one.result())
            raise
        found: list[_Ended] = []
        for (topic, poll), reply in zip(asked, ended, strict=True):
            if isinstance(reply, PollReply | PostroomError):
                found.append((topic, poll, reply))
            elif not isinstance(reply, asyncio.CancelledError):
                raise reply
        return found

    def _give_back(self, poll: PartialPoll, reply: PollReply) -> None:
        """Nobody was told of it: others need not wait for the lease to end."""
        given = [
            ((one.topic, one.partition_id, one.token), v)
            for one in released(poll, reply.grants)
            for v in one.verdicts
        ]
        task = asyncio.ensure_future(self._settling.quietly(poll.topic, poll.group, given))
        self._returning.add(task)
        task.add_done_callback(self._returning.discard)

    def _refuse(self, answer: Sharing, topic: WantedTopic, error: PostroomError) -> None:
        """Clients take few codes there; this one makes them look for the broker again, and ask again."""
        if isinstance(error, UnknownGroup):
            raise ShareError(Code.GROUP_ID_NOT_FOUND, "there is no such share group: join it")
        code_of(error)  # which logs what is a fault of ours
        for index, _ in topic.at.values():
            partition = answer.partition(topic.view.id, index)
            partition.error, partition.message = Code.NOT_LEADER, str(error)

    async def _account_for(self, topic: WantedTopic, group: str, rest: Handing) -> None:
        """Done with what holds nothing; of what no batch came for, what the log no longer has is gone."""
        settled = rest.settled
        for key, (first, last) in rest.missing:
            try:
                found = await self._broker.fetch(
                    key[0], key[1], first, max_messages=1, max_bytes=1, wait_ms=0
                )
            except PostroomError:
                continue  # its lease ends
            settled.append((key, Verdict("ack" if last < found.start else "release", first, last)))
        await self._settling.quietly(topic.view.name, group, settled)


def _was_given(poll: asyncio.Future[PollReply]) -> bool:
    return not poll.cancelled() and poll.exception() is None and bool(poll.result().grants)


def _acknowledges(request: Any) -> bool:
    return any(one.acknowledgement_batches for topic in request.topics for one in topic.partitions)


def _change_partitions(session: ShareSession, request: Any, answer: Sharing) -> None:
    for topic in request.topics:
        for one in topic.partitions:
            session.partitions[topic.topic_id, one.partition_index] = None
            answer.partition(topic.topic_id, one.partition_index).named = True
    for topic in request.forgotten_topics_data or ():
        for index in topic.partitions:
            session.partitions.pop((topic.topic_id, index), None)
    if len(session.partitions) > _MOST_PARTITIONS:
        session.partitions.clear()
        raise ShareError(Code.INVALID_REQUEST, f"a session has at most {_MOST_PARTITIONS:,} partitions")
