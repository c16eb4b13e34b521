"""The server for Kafka clients: listens, knows its connections, and enters itself among the nodes.

Keeps nothing that the store does not have. It may be killed at any time: clients go on with another broker.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from dataclasses import replace

from ..broker.access import Gatekeeper
from ..broker.served import Servable, figures_of
from ..errors import InvalidSetting, PostroomError
from ..wire.server.answers import Answers
from ..wire.server.listening import Acceptor, Listening, end_all, listen, told_address
from .connection import Connection
from .groups.coordinator import Coordinator
from .hot import Node
from .messages import check_installed
from .metadata import Cluster
from .session import Session
from .share.groups import SharedByName
from .share.members import ShareMembers
from .share.sessions import ShareSessions
from .topics import Topics

__all__ = ["KafkaServer"]

_log = logging.getLogger("postroom.kafka")


class KafkaServer:
    """`listening`: host and port are those for Kafka clients, `advertise` is what these are told."""

    def __init__(
        self,
        broker: Servable,
        listening: Listening,
        gatekeeper: Gatekeeper,
        answers: Answers,
        *,
        creates_topics: bool = False,
    ) -> None:
        check_installed()
        self.broker, self.listening, self.gatekeeper = broker, listening, gatekeeper
        self.answers, self.creates_topics = answers, creates_topics
        self.figures = figures_of(broker)
        self.one_answer_bytes = listening.one_answer_bytes
        self.cluster: Cluster = self
        self.cluster_id = ""
        self.topics: Topics
        self.coordinator: Coordinator
        self.tuning = listening.tuning
        loop = asyncio.get_running_loop()
        self.share_sessions = ShareSessions(
            lambda: int(loop.time() * 1000),
            self.tuning.kafka_share_idle_ms,
            sweep_ms=self.tuning.kafka_share_sweep_ms,
        )
        self.share_members = ShareMembers(self.share_sessions.now, self.tuning)
        self.shared_by_name = SharedByName(broker)
        self.pending_bytes = 0  # of requests under way
        self.connections: set[Connection] = set()
        self._id = str(uuid.uuid4())
        self._nodes: tuple[Node, ...] = ()
        self._number = -1  # among the nodes
        self._server: Acceptor | None = None
        self._duties: list[asyncio.Task[None]] = []
        self._short_of_room = False

    # ---- life ----

    async def start(self) -> None:
        """Listen, and be known. UsageError if the port is taken."""
        self.cluster_id = await self.broker.in_thread(self.broker.store.brokers.queue)
        self.topics = Topics(self.broker, self.cluster_id)
        tuning = self.listening.tuning
        self.coordinator = Coordinator(
            self.broker, self._id, lambda: self._nodes, lambda: self._number, tuning
        )
        await self.broker.identity_key()  # no client is to wait for it
        host, port = self.listening.host, self.listening.port
        sockets = listen(host, port, " for Kafka clients", "choose another port, or stop what is there")
        self.listening = replace(self.listening, port=int(sockets[0].getsockname()[1]))
        self._host_port = _split(self.address)
        try:
            await self._enter()
        except BaseException:
            for one in sockets:
                one.close()
            raise
        self._server = Acceptor(
            sockets,
            lambda: Connection(self),
            tls=self.listening.tls,
            handshakes=self.listening.handshakes,
            handshake_s=self.listening.unauthenticated_ms / 1000,
        )
        self._duties = [asyncio.create_task(self._keep_entering()), asyncio.create_task(self._keep_ticking())]

    async def stop(self, grace_ms: int = 10_000) -> None:
        """Take no more, let what is being stored end within the grace; then close."""
        if self._server is not None:
            self._server.close()
        for duty in self._duties:
            duty.cancel()
        await asyncio.gather(*self._duties, return_exceptions=True)
        try:
            await self.broker.in_thread(self.broker.store.brokers.leave_node, self._id)
        except PostroomError as error:
            _log.warning("could not be taken from the list of nodes; it will be forgotten: %s", error)
        await self.coordinator.stop()
        await end_all(self.connections, grace_ms)

    @property
    def port(self) -> int:
        return self.listening.port

    @property
    def address(self) -> str:
        """Where clients find it: host:port."""
        return told_address(self.listening, self.port)

    # ---- among the nodes ----

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self._nodes

    @property
    def protocol(self) -> str:
        return "PLAINTEXT" if self.listening.tls is None else "SSL"

    async def _enter(self) -> None:
        brokers = self.broker.store.brokers

        def enter() -> tuple[int, tuple[Node, ...]]:
            mine = brokers.enter_node(self._id, self.address, self.listening.tuning.entered_ms)
            others = [
                Node(one.node_id, *_split(one.address)) for one in brokers.nodes() if one.node_id != mine
            ]
            return mine, tuple(sorted([Node(mine, *self._host_port), *others]))

        self._number, self._nodes = await self.broker.in_thread(enter)

    async def _keep_entering(self) -> None:
        while True:
            await asyncio.sleep(self.listening.tuning.enter_s)
            try:
                await self._enter()
                await self.coordinator.keep()
            except PostroomError as error:
                _log.warning("the list of nodes cannot be kept now: %s", error)

    # ---- connections ----

    def session(self, loopback: bool, certificate_name: str | None) -> Session:
        return Session(self, loopback=loopback, certificate_name=certificate_name)

    def connected(self, connection: Connection) -> None:
        """Whoever has not said for longest who it is gives way: strangers keep no client out."""
        self.connections.add(connection)
        if len(self.connections) > self.listening.max_connections:
            strangers = (one for one in self.connections if not one.known and one is not connection)
            next(strangers, connection).abort()

    def disconnected(self, connection: Connection) -> None:
        self.connections.discard(connection)

    def freed(self) -> None:
        """A request ended: whoever was not read for want of room may be read again."""
        full = self.pending_bytes >= self.listening.all_request_bytes
        if self._short_of_room and not full:
            for connection in list(self.connections):
                connection.throttle()
        self._short_of_room = full

    def refused(self, peer: str, error: BaseException) -> None:
        said = "the connection of a Kafka client from %s was closed: %s"
        self.gatekeeper.refusals.say("greeting", _log, said, peer, error)

    async def _keep_ticking(self) -> None:
        while True:
            await asyncio.sleep(self.listening.tuning.tick_s)
            now = asyncio.get_running_loop().time()
            for connection in list(self.connections):
                try:
                    connection.tick(now)
                except Exception:  # its fault, and nobody else's
                    _log.exception("the connection of %s is closed", connection.peer)
                    connection.abort()


def _split(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not host or not colon or not port.isdecimal():
        raise InvalidSetting(f"kafka_advertised is {address!r}: write host:port as clients reach it")
    return host.strip("[]"), int(port)
