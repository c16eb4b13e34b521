"""What one Kafka client asks, and who it is: log-in, permissions, and the handler of each request.

Before a client is known it may ask which versions there are, and log in; whatever else it asks is asked as
whoever it is without a log-in (its certificate's name, or anybody on this machine if the broker is for
development). A handler never decides who may do what: permissions are those of the table of operations, as
at every other door.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol

from ..broker.access import Gatekeeper
from ..broker.metrics import Figures
from ..broker.served import Servable
from ..config import WireTuning
from ..endpoint.asker import asked_by
from ..endpoint.operations import OPERATIONS
from ..errors import NotAuthenticated, PostroomError, ProtocolError
from ..model.access import Principal
from ..model.audit import Asker
from ..wire.server.answers import Answers, Share
from .administration import Administration
from .apis import APIS, Api, ApiVersions, Code, advertised
from .groups.coordinator import Coordinator
from .groups.listing import Groups
from .groups.membership import GroupAccess, Membership
from .groups.offsets import Offsets
from .hot import (
    Produced,
    api_versions,
    fetch_answer,
    metadata_answer,
    produce_answer,
    read_fetch,
    read_produce,
)
from .messages import read_request, written
from .metadata import Cluster, Describing
from .primitives import Piece, Reader, framed
from .produce import Producing
from .reading import Reading
from .share.answers import acknowledge_answer as share_acknowledge_answer
from .share.answers import fetch_answer as share_fetch_answer
from .share.fetching import ShareDeliveries
from .share.groups import SharedByName, ShareGroups
from .share.members import ShareMembers, ShareMembership
from .share.sessions import ShareSessions
from .share.settling import Settling
from .share.share_offsets import ShareOffsets
from .topics import Topics

__all__ = ["Answer", "Asked", "Door", "Session", "read_header"]

Answer = list[Piece] | Coroutine[Any, Any, list[Piece] | None]
"""The bytes of an answer, or what will return them; None: there is none."""

_PLAIN = "PLAIN"
_BEFORE_LOGIN = ("sasl_handshake", "sasl_authenticate", "api_versions")
_LONGEST_LOGIN = 64 * 1024
_HOT = (
    "produce",
    "fetch",
    "heartbeat",
    "offset_commit",
    "offset_fetch",
    "list_offsets",
)  # change no settings


class Door(Protocol):
    """The server, as far as a session needs it."""

    broker: Servable
    gatekeeper: Gatekeeper
    topics: Topics
    cluster: Cluster
    answers: Answers
    coordinator: Coordinator
    share_sessions: ShareSessions
    share_members: ShareMembers
    shared_by_name: SharedByName
    tuning: WireTuning
    figures: Figures | None
    one_answer_bytes: int


class Asked(NamedTuple):
    """The header of a request, and where its body begins."""

    api: Api
    version: int
    id: int
    client: str  # as it calls itself
    body: memoryview

    @property
    def tagged(self) -> bool:
        """Whether the header of its answer has tags; that of ApiVersions never has: all can read it."""
        return self.version >= self.api.flexible and self.api is not ApiVersions


def read_header(frame: memoryview) -> Asked:
    """The header of a request. ProtocolError if it is of an API that is not served, or is none."""
    reader = Reader(frame)
    key, version, id = reader.i16(), reader.i16(), reader.i32()
    api = APIS.get(key)
    if api is None or not (api.serves(version) or api is ApiVersions):
        raise ProtocolError(f"a Kafka client asked for API {key} in version {version}, which is not served")
    client = reader.string(flexible=False) or ""
    if api.serves(version) and version >= api.flexible:
        reader.tags()
    return Asked(api, version, id, client, frame[reader.at :])


class Session:
    """`loopback`, `certificate_name`: what is known of the client before it says anything."""

    def __init__(self, door: Door, *, loopback: bool, certificate_name: str | None) -> None:
        self._door = door
        self._loopback, self._certificate_name = loopback, certificate_name
        self._principal: Principal | None = None
        self._shaken = False  # hands: it may log in now
        self.share: Share | None = None
        self.host = ""  # of the client, for those who list members
        broker, topics = door.broker, door.topics
        self._producing = Producing(broker, topics, self._permit, self._told)
        self._reading = Reading(broker, topics, self._permit)
        self._share_groups = ShareGroups(broker, self._permit, self._name, door.tuning, door.shared_by_name)
        self._administration = Administration(broker, topics, self._permit, door.cluster, self._share_groups)
        create = self._administration.create
        self._describing = Describing(door.cluster, topics, self._permit, self._visible, create)
        self._handlers: dict[str, Callable[[Asked], Awaitable[Answer]]] = (
            self._about_shares()
            | self._about_groups()
            | {
                "produce": self._produce,
                "fetch": self._fetch,
                "metadata": self._metadata,
                "api_versions": self._api_versions,
                "list_offsets": self._by_request(self._reading.list_offsets),
                "sasl_handshake": self._handshake,
                "sasl_authenticate": self._by_request(self._authenticate),
                "create_topics": self._by_request(self._administration.create_topics),
                "delete_topics": self._by_request(self._administration.delete_topics),
                "delete_records": self._by_request(self._administration.delete_records),
                "init_producer_id": self._by_request(self._administration.init_producer_id),
                "describe_configs": self._by_request(self._administration.describe_configs),
                "incremental_alter_configs": self._by_request(self._administration.alter_configs),
                "describe_cluster": self._by_request(self._describing.describe_cluster),
            }
        )

    def _about_groups(self) -> dict[str, Callable[[Asked], Awaitable[Answer]]]:
        door = self._door
        access = GroupAccess(door.broker, door.coordinator, self._permit)
        self._membership = Membership(door.coordinator, access, lambda: self.host)
        offsets = Offsets(door.broker, door.topics, door.coordinator, access)
        groups = Groups(door.broker, door.coordinator, access, self._share_groups, self._sharing.states)
        return {
            "join_group": self._enter_group,
            "find_coordinator": self._by_request(self._membership.find_coordinator),
            "sync_group": self._by_request(self._membership.sync),
            "heartbeat": self._by_request(self._membership.heartbeat),
            "leave_group": self._by_request(self._membership.leave),
            "offset_commit": self._by_request(offsets.commit),
            "offset_fetch": self._by_request(offsets.fetch),
            "offset_delete": self._by_request(offsets.delete),
            "list_groups": self._by_request(groups.listed),
            "describe_groups": self._by_request(groups.describe),
            "delete_groups": self._by_request(groups.delete),
        }

    def _about_shares(self) -> dict[str, Callable[[Asked], Awaitable[Answer]]]:
        door, groups = self._door, self._share_groups
        self._sharing = ShareMembership(
            door.broker, door.topics, door.coordinator, door.share_members, groups, self._permit, self._name,
            door.tuning,
        )  # fmt: skip
        self._share_deliveries = ShareDeliveries(
            door.broker, door.topics, door.share_sessions, Settling(door.broker, door.tuning), self._permit,
            self._name,
        )  # fmt: skip
        offsets = ShareOffsets(door.broker, door.topics, groups, self._permit)
        return {
            "share_group_heartbeat": self._share_heartbeat,
            "share_group_describe": self._by_request(self._sharing.describe),
            "share_fetch": self._share_fetch,
            "share_acknowledge": self._share_acknowledge,
            "describe_share_group_offsets": self._by_request(offsets.describe),
            "alter_share_group_offsets": self._by_request(offsets.alter),
            "delete_share_group_offsets": self._by_request(offsets.delete),
        }

    @property
    def known(self) -> bool:
        """Whether the client has said who it is, as far as it has to."""
        return self._principal is not None

    # ---- asking ----

    async def begin(self, asked: Asked) -> Answer:
        """The answer, or for what is stored in line, what waits for it. ProtocolError ends the connection."""
        began = time.perf_counter()
        error: BaseException | None = None
        try:
            if asked.api.name not in _BEFORE_LOGIN:
                await self._log_in()
            with nullcontext() if asked.api.name in _HOT else asked_by(self._asker()):
                return await self._handlers[asked.api.name](asked)
        except BaseException as failed:
            error = failed
            raise
        finally:
            if self._door.figures is not None:
                self._door.figures.ended(f"kafka_{asked.api.name}", time.perf_counter() - began, error)

    async def welcome(self) -> None:
        """Know the client before it says anything, if it need not log in."""
        try:
            await self._log_in()
        except PostroomError:  # it has to, or it is told when it asks
            pass

    async def _log_in(self) -> None:
        """Who asks, and with which permissions now. NotAuthenticated if nobody may ask without a log-in."""
        gatekeeper = self._door.gatekeeper
        if self._principal is None:
            found = await gatekeeper.authenticate(
                None, peer_is_loopback=self._loopback, certificate_name=self._certificate_name
            )
            self._known_as(found)
        else:
            self._principal = await gatekeeper.current(self._principal)

    def _known_as(self, principal: Principal) -> None:
        self._principal = principal
        self.share = self._door.answers.share(principal.name)

    def _permit(self, operation: str, topic: str | None) -> None:
        assert self._principal is not None, "it was looked at before"
        self._door.gatekeeper.check(self._principal, OPERATIONS[operation].need, topic)

    def _asker(self) -> Asker:
        name = "unknown" if self._principal is None else self._principal.name
        return Asker(name, "kafka", self.host.removeprefix("/"))

    def _name(self) -> str:
        assert self._principal is not None, "it was looked at before"
        return self._principal.name

    def _told(self) -> dict[str, Any]:
        assert self._principal is not None, "it was looked at before"
        return dict(OPERATIONS["append"].told(self._principal))

    def _visible(self, topics: Iterable[str]) -> set[str]:
        assert self._principal is not None, "it was looked at before"
        return self._door.gatekeeper.visible(self._principal, topics)

    def _by_request(
        self, handler: Callable[[Any], Awaitable[dict[str, Any]]]
    ) -> Callable[[Asked], Awaitable[Answer]]:
        async def handle(asked: Asked) -> Answer:
            request = read_request(asked.api.key, asked.version, asked.body)
            return _framed(asked, written(asked.api.key, asked.version, await handler(request)))

        return handle

    # ---- messages ----

    async def _produce(self, asked: Asked) -> Answer:
        request = read_produce(asked.version, asked.body)
        storing = await self._producing.begin(asked.version, request)

        async def stored() -> list[Piece] | None:
            produced = await storing
            if request.acks == 0:
                _refuse_unanswered(produced)
                return None
            return _framed(asked, produce_answer(asked.version, produced))

        return stored()

    async def _fetch(self, asked: Asked) -> Answer:
        request = read_fetch(asked.version, asked.body)
        if request.session_id:  # none was ever begun
            return _framed(asked, fetch_answer(asked.version, (), Code.FETCH_SESSION_NOT_FOUND))
        topics = await self._reading.fetch(asked.version, request, self._door.one_answer_bytes)
        size = sum(len(piece) for topic in topics for one in topic.partitions for piece in one.pieces)
        if not self._fits(size):  # it asks again
            for topic in topics:
                for one in topic.partitions:
                    one.pieces = []
        return _framed(asked, fetch_answer(asked.version, topics))

    async def _metadata(self, asked: Asked) -> Answer:
        request = read_request(asked.api.key, asked.version, asked.body)
        found = await self._describing.metadata(asked.version, request)
        return _framed(asked, metadata_answer(asked.version, found))

    async def _enter_group(self, asked: Asked) -> Answer:
        request = read_request(asked.api.key, asked.version, asked.body)
        found = await self._membership.join(asked.version, asked.client, request)
        return _framed(asked, written(asked.api.key, asked.version, found))

    # ---- share groups ----

    async def _share_heartbeat(self, asked: Asked) -> Answer:
        request = read_request(asked.api.key, asked.version, asked.body)
        found = await self._sharing.heartbeat(asked.client, self.host, request)
        return _framed(asked, written(asked.api.key, asked.version, found))

    async def _share_fetch(self, asked: Asked) -> Answer:
        request = read_request(asked.api.key, asked.version, asked.body)
        found = await self._share_deliveries.fetch(request, self._door.one_answer_bytes, self._fits)
        return _framed(asked, share_fetch_answer(asked.version, found))

    def _fits(self, size: int) -> bool:
        return self.share is None or self.share.fits(size)

    async def _share_acknowledge(self, asked: Asked) -> Answer:
        request = read_request(asked.api.key, asked.version, asked.body)
        found = await self._share_deliveries.acknowledge(request)
        return _framed(asked, share_acknowledge_answer(asked.version, found))

    # ---- log-in ----

    async def _api_versions(self, asked: Asked) -> Answer:
        if not asked.api.serves(asked.version):  # answered as version 0, which all can read
            known = (asked.api.key, asked.api.lowest, asked.api.highest)
            return _framed(asked, api_versions(0, [known], Code.UNSUPPORTED_VERSION))
        error = self._other_cluster(asked)
        return _framed(asked, api_versions(asked.version, advertised(), error))

    def _other_cluster(self, asked: Asked) -> int:
        """From version 5 on clients say whom they think they talk to."""
        if asked.version < 5:
            return Code.NONE
        reader = Reader(asked.body)
        reader.string(flexible=True)
        reader.string(flexible=True)
        cluster, node = reader.string(flexible=True), reader.i32()
        nodes = {one.id for one in self._door.cluster.nodes}
        other = cluster not in (None, self._door.cluster.cluster_id) or (node >= 0 and node not in nodes)
        return Code.REBOOTSTRAP_REQUIRED if other else Code.NONE

    async def _handshake(self, asked: Asked) -> Answer:
        request = read_request(asked.api.key, asked.version, asked.body)
        error = Code.NONE
        if asked.version == 0:  # what follows it is not framed as requests are
            error = Code.UNSUPPORTED_VERSION
        elif request.mechanism != _PLAIN:
            error = Code.UNSUPPORTED_SASL_MECHANISM
        self._shaken = not error
        answer = {"error_code": error, "mechanisms": (_PLAIN,)}
        return _framed(asked, written(asked.api.key, asked.version, answer))

    async def _authenticate(self, request: Any) -> dict[str, Any]:
        """PLAIN: an identity, a name and a password, of which the password is a token of Postroom's."""
        answer = {"error_code": 0, "error_message": None, "auth_bytes": b"", "session_lifetime": 0}
        if not self._shaken:
            return answer | {"error_code": Code.ILLEGAL_SASL_STATE, "error_message": "shake hands first"}
        self._shaken = False
        said: bytes = request.auth_bytes
        parts = said.split(b"\0") if len(said) <= _LONGEST_LOGIN else []
        try:
            if len(parts) != 3:
                raise NotAuthenticated("this is not PLAIN: a name and a password, which is a Postroom token")
            token = parts[2].decode(errors="replace")
            found = await self._door.gatekeeper.authenticate(token or None, peer_is_loopback=False)
            self._known_as(found)
            return answer
        except PostroomError as error:
            code = Code.SASL_AUTHENTICATION_FAILED
            return answer | {"error_code": code, "error_message": str(error)}


def _framed(asked: Asked, pieces: list[Piece]) -> list[Piece]:
    return framed(asked.id, asked.tagged, pieces)


def _refuse_unanswered(produced: tuple[Produced, ...]) -> None:
    """Whoever wants no answer learns of an error by the end of its connection, as with Kafka."""
    failed = next((one for one in produced if one.error), None)
    if failed is not None:
        raise ProtocolError(f"a batch without an answer was refused ({failed.error}): {failed.message}")
