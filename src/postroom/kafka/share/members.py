"""ShareGroupHeartbeat and ShareGroupDescribe: how consumers of share groups come, stay and go.

Every member is assigned every partition of its topics: leases keep them apart. So a coordinator has nothing
to agree on with anybody; what it knows of a member is in memory, and a member that it does not know is told
to join again, which costs nothing: leases are in the store. On each topic a member is a member of the group
there, as native ones are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from ...broker.served import Servable
from ...config import WireTuning
from ...endpoint.values import Beat, GroupInfo
from ...errors import (
    GroupConflict,
    InvalidName,
    LimitReached,
    PostroomError,
    StoreError,
    UnknownGroup,
    UnknownTopic,
)
from ...model.policy.fair_shares import FairShares
from ...model.policy.settings import GroupWish
from ...model.share_session import next_epoch
from ...model.topology.names import check_topic, share_group
from ...store.contract import Group
from ..apis import Code, code_of
from ..groups.coordinator import Coordinator
from ..hot import NO_OPERATIONS
from ..topics import KafkaTopic, Topics
from .fetching import check_group, check_member
from .groups import ShareGroups
from .sessions import ShareError

__all__ = ["ShareMembers", "ShareMembership"]

_NEW, _LEAVES = 0, -1  # epochs of a member
_MOST_MEMBERS = 20_000  # of all groups, on this broker
_MOST_TOPICS = 250  # of a member
_MOST_SUBSCRIBED = 200_000  # of all members, on this broker: names that are kept
_LONGEST_CLIENT = 100
_STABLE, _EMPTY, _DEAD = "Stable", "Empty", "Dead"

_Assigned = tuple[tuple[UUID, tuple[int, ...]], ...]


@dataclass(slots=True)
class _Member:
    id: str
    owner: str  # the principal
    client: str
    host: str
    epoch: int = 0
    topics: tuple[str, ...] = ()
    assigned: _Assigned = ()
    entered: set[str] = field(default_factory=set)  # topics whose groups it is a member of
    heard_at: int = 0


class ShareMembers:
    """The members that this broker coordinates, by group and name. `now`: milliseconds."""

    def __init__(self, now: Callable[[], int], tuning: WireTuning) -> None:
        self._now, self._silent_ms = now, tuning.kafka_share_session_ms
        self._known: dict[tuple[str, str], _Member] = {}  # whoever was heard of last is the last
        self._groups: dict[str, dict[str, _Member]] = {}
        self._members, self._subscribed = FairShares(), FairShares()  # and topics that they subscribe to

    def heard(self, group: str, id: str) -> _Member | None:
        """The member, which is heard of now."""
        self._forget_silent()
        member = self._known.pop((group, id), None)
        if member is not None:
            member.heard_at = self._now()
            self._known[group, id] = member
        return member

    def enter(self, group: str, member: _Member) -> None:
        """Know a member, instead of whoever had its name. ShareError if there are too many."""
        self.leave(group, member.id)
        self._forget_silent()
        if not self._members.room(member.owner, _MOST_MEMBERS):
            raise ShareError(
                Code.GROUP_MAX_SIZE_REACHED,
                f"this broker has {len(self._known):,} members, and a client has no more than half of what "
                "others leave: close some, or add a broker",
            )
        member.heard_at = self._now()
        self._members.take(member.owner, 1)
        self._known[group, member.id] = member
        self._groups.setdefault(group, {})[member.id] = member

    def subscribe(self, member: _Member, topics: tuple[str, ...]) -> None:
        """Keep what a member subscribes to. ShareError if that is more, and there is no room for it."""
        more = len(topics) - len(member.topics)
        if more > 0 and more > self._subscribed.room(member.owner, _MOST_SUBSCRIBED):
            raise ShareError(
                Code.GROUP_MAX_SIZE_REACHED,
                f"the members that this broker has subscribe to {self._subscribed.total:,} topics, and a "
                "client has no more than half of what others leave: subscribe to fewer, or add a broker",
            )
        self._subscribed.take(member.owner, more)
        member.topics = topics

    def leave(self, group: str, id: str) -> None:
        member = self._known.pop((group, id), None)
        if member is not None:
            self._members.take(member.owner, -1)
            self._subscribed.take(member.owner, -len(member.topics))
        members = self._groups.get(group, {})
        members.pop(id, None)
        if not members:
            self._groups.pop(group, None)

    def of(self, group: str) -> list[_Member]:
        self._forget_silent()
        return list(self._groups.get(group, {}).values())

    def _forget_silent(self) -> None:
        while self._known:
            first = next(iter(self._known))
            if self._known[first].heard_at + self._silent_ms > self._now():
                break
            self.leave(*first)


class ShareMembership:
    """The requests of one connection. `permit`: operation and topic; `who`: the client's principal."""

    def __init__(
        self,
        broker: Servable,
        topics: Topics,
        coordinator: Coordinator,
        members: ShareMembers,
        groups: ShareGroups,
        permit: Callable[[str, str], None],
        who: Callable[[], str],
        tuning: WireTuning,
    ) -> None:
        self._broker, self._topics, self._coordinator = broker, topics, coordinator
        self._members, self._groups = members, groups
        self._permit, self._who = permit, who
        self._beat_ms = tuning.kafka_share_beat_ms

    # ---- ShareGroupHeartbeat ----

    async def heartbeat(self, client: str, host: str, request: Any) -> dict[str, Any]:
        answer = {
            "throttle_time": 0, "error_code": 0, "error_message": None, "member_id": request.member_id,
            "member_epoch": request.member_epoch, "heartbeat_interval": self._beat_ms, "assignment": None,
        }  # fmt: skip
        try:
            group, id = check_group(request.group_id), check_member(request.member_id)
            if not self._coordinator.is_mine(group):
                raise ShareError(Code.NOT_COORDINATOR, "another broker coordinates this group: look for it")
            if request.member_epoch == _LEAVES:
                await self._leave(group, id)
                return answer
            member = self._member(group, id, request.member_epoch, client, host)
            try:
                tell = await self._subscribe(group, member, request)
            except BaseException:
                if not member.epoch:  # it has not come in: nothing is kept of it
                    self._members.leave(group, id)
                raise
            if tell:
                answer["assignment"] = {"topic_partitions": _shown(member.assigned)}
            return answer | {"member_epoch": member.epoch}
        except ShareError as error:
            return answer | {"error_code": error.code, "error_message": error.message}
        except PostroomError as error:
            return answer | {"error_code": _code(error), "error_message": str(error)}

    def _member(self, group: str, id: str, epoch: int, client: str, host: str) -> _Member:
        """The member that a heartbeat is of. ShareError if it is not known: it joins again."""
        member = self._members.heard(group, id)
        if member is not None and member.owner != self._who():
            raise ShareError(Code.UNKNOWN_MEMBER_ID, "that is another client's member: choose another name")
        if epoch == _NEW:
            name = client[:_LONGEST_CLIENT]
            client = name if name.isprintable() else ""
            member = _Member(id, self._who(), client, host)
            self._members.enter(group, member)
        elif member is None:
            raise ShareError(Code.UNKNOWN_MEMBER_ID, "it is not known as a member: join again, with epoch 0")
        elif next_epoch(epoch) != member.epoch and epoch != member.epoch:
            raise ShareError(Code.FENCED_MEMBER_EPOCH, f"epoch {member.epoch} is the member's: join again")
        return member

    async def _subscribe(self, group: str, member: _Member, request: Any) -> bool:
        """Enter the groups of its topics; returns whether it is to be told what it is assigned."""
        asked = request.subscribed_topic_names
        if asked is not None:
            if len(asked) > _MOST_TOPICS:
                raise ShareError(Code.INVALID_REQUEST, f"subscribe to {_MOST_TOPICS} topics at most")
            self._members.subscribe(member, tuple(dict.fromkeys(filter(_may_be, asked))))
        elif request.member_epoch == _NEW:
            raise ShareError(Code.INVALID_REQUEST, "whoever joins says which topics it subscribes to")
        views = await self._views(member.topics)
        await self._enter(group, member, [view.name for view in views])
        assigned = tuple((view.id, view.indexes) for view in views)
        changed = assigned != member.assigned or not member.epoch
        repeated = request.member_epoch != member.epoch
        if changed:
            member.assigned, member.epoch = assigned, next_epoch(member.epoch)
        return changed or repeated or asked is not None

    async def _views(self, names: Iterable[str]) -> list[KafkaTopic]:
        """Those of the topics that are there; the others may come."""
        found = []
        for name in names:
            try:
                self._permit("subscribe", name)
                found.append(await self._topics.view(name))
            except UnknownTopic:
                pass
        return found

    async def _enter(self, group: str, member: _Member, topics: list[str]) -> None:
        native = share_group(group)
        for topic in member.entered.difference(topics):
            await self._broker.unsubscribe(topic, native, member.id)
            member.entered.discard(topic)
        known = [topic for topic in topics if topic in member.entered]
        beats = [Beat(topic, native, member.id, member.client, ()) for topic in known]
        try:
            if beats:
                await self._broker.in_thread(self._broker.beat, beats)
        except (UnknownGroup, UnknownTopic):  # somebody has deleted one
            member.entered.clear()
        for topic in topics:
            if topic not in member.entered:
                await self._groups.make(topic, group)
                wish = GroupWish(mode="shared")
                await self._broker.subscribe(topic, native, wish, member.id, member.client)
                member.entered.add(topic)

    async def _leave(self, group: str, id: str) -> None:
        member = self._members.heard(group, id)
        if member is None or member.owner != self._who():
            raise ShareError(Code.UNKNOWN_MEMBER_ID, "it is not known as a member")
        self._members.leave(group, id)
        for topic in member.entered:
            await self._broker.unsubscribe(topic, share_group(group), id)

    # ---- ShareGroupDescribe ----

    async def describe(self, request: Any) -> dict[str, Any]:
        return {"throttle_time": 0, "groups": [await self._described(name) for name in request.group_ids]}

    async def _described(self, name: str) -> dict[str, Any]:
        answer: dict[str, Any] = {
            "error_code": 0, "error_message": None, "group_id": name, "group_state": _DEAD, "group_epoch": 0,
            "assignment_epoch": 0, "assignor_name": "simple", "members": (),
            "authorized_operations": NO_OPERATIONS,
        }  # fmt: skip
        try:
            check_group(name)
            if not self._coordinator.is_mine(name):
                raise ShareError(Code.NOT_COORDINATOR, "another broker coordinates this group: look for it")
            groups = await self._groups.of(name)
            self._groups.check("groups", groups)
            if not groups:
                raise ShareError(Code.GROUP_ID_NOT_FOUND, f"there is no share group {name!r}")
            members = await self._listed(name, [group.topic for group in groups])
            epoch = max((member["member_epoch"] for member in members), default=1)
            return answer | {
                "group_state": _STABLE if members else _EMPTY, "group_epoch": epoch,
                "assignment_epoch": epoch, "members": members,
            }  # fmt: skip
        except ShareError as error:
            return answer | {"error_code": error.code, "error_message": error.message}
        except PostroomError as error:
            return answer | {"error_code": _code(error), "error_message": str(error)}

    async def _listed(self, name: str, topics: Iterable[str]) -> list[dict[str, Any]]:
        """The members of a group, native ones too."""
        views = {topic: await self._topics.view(topic) for topic in topics}
        known = {member.id: member for member in self._members.of(name)}
        found = [_described(member, views) for member in known.values()]
        for topic, view in views.items():
            for group in await self._broker.groups(topic):
                if group.name == share_group(name):
                    found += _native(group, view, known)
        return found

    async def states(self, groups: Mapping[str, Iterable[Group]]) -> dict[str, str]:
        """What a list of groups says of each: one look at each topic, however many groups it has."""
        live: set[tuple[str, str]] = set()
        for topic in {one.topic for each in groups.values() for one in each}:
            live |= {(topic, one.name) for one in await self._broker.groups(topic) if one.members}
        return {
            name: _STABLE
            if self._members.of(name) or any((one.topic, one.name) in live for one in each)
            else _EMPTY
            for name, each in groups.items()
        }


def _may_be(topic: str) -> bool:
    """Whether there can be such a topic: what cannot be will never come, and is not kept."""
    try:
        return bool(check_topic(topic))
    except InvalidName:
        return False


def _code(error: PostroomError) -> int:
    """Codes that share consumers know; the sentence is told beside it."""
    if isinstance(error, StoreError):
        return Code.COORDINATOR_NOT_AVAILABLE
    if isinstance(error, LimitReached):
        return Code.GROUP_MAX_SIZE_REACHED
    return Code.INVALID_REQUEST if isinstance(error, GroupConflict) else code_of(error)


def _shown(assigned: _Assigned) -> list[dict[str, Any]]:
    return [{"topic_id": id, "partitions": indexes} for id, indexes in assigned]


def _described(member: _Member, views: dict[str, KafkaTopic]) -> dict[str, Any]:
    names = {view.id: view.name for view in views.values()}
    partitions = [
        {"topic_id": id, "topic_name": names[id], "partitions": indexes}
        for id, indexes in member.assigned
        if id in names
    ]
    return {
        "member_id": member.id, "rack_id": None, "member_epoch": member.epoch, "client_id": member.client,
        "client_host": member.host, "subscribed_topic_names": member.topics,
        "assignment": {"topic_partitions": partitions},
    }  # fmt: skip


def _native(group: GroupInfo, view: KafkaTopic, known: dict[str, _Member]) -> list[dict[str, Any]]:
    """Members of the SDK, which have no epoch: they read all there is."""
    assigned = ((view.id, view.indexes),)
    return [
        _described(_Member(one.name, "", one.client, "", 1, (view.name,), assigned), {view.name: view})
        for one in group.members
        if one.name not in known
    ]
