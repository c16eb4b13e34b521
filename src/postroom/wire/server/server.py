"""The server of a broker: listens, knows its connections, and enters itself among the brokers (R2).

Keeps nothing that the store does not have: connections, and who else is served. It may be killed at any time:
clients go on with another broker, and what it had handed out is delivered again when its lease ends.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid

from ...broker.access import Gatekeeper
from ...broker.served import Servable
from ...endpoint.operations import OPERATIONS
from ...errors import BrokerUnavailable, PostroomError
from ..messages import BrokerInfo, BrokerList, Hello, Welcome
from .answers import Answers
from .connection import Connection
from .listening import Acceptor, Listening, end_all, listen, told_address
from .session import Session

__all__ = ["WireServer"]

_log = logging.getLogger("postroom.wire")

_OFFERS = tuple(one.name for one in OPERATIONS.values() if one.early)  # what the first brokers did not know


class WireServer:
    def __init__(self, broker: Servable, listening: Listening, gatekeeper: Gatekeeper) -> None:
        self.broker, self.listening, self._gatekeeper = broker, listening, gatekeeper
        self.id = str(uuid.uuid4())
        self.connections: set[Connection] = set()
        self._strangers: dict[Connection, None] = {}  # of these, who has not said who it is, the oldest first
        self.begun_bytes = 0  # of frames that are not whole
        self.held_bytes = 0  # of requests under way
        self.answers = Answers(listening.all_answer_bytes, listening.answer_bytes, listening.answer_wait_ms)
        self._brokers: tuple[BrokerInfo, ...] = ()
        self._queue = ""
        self._server: Acceptor | None = None
        self._duties: list[asyncio.Task[None]] = []
        self.short_of_room = False
        self._entering = threading.Lock()
        self._left = False
        self._started_at = time.time_ns() // 1_000_000

    # ---- life ----

    async def start(self) -> None:
        """Listen, and be known. UsageError if the port is taken."""
        # Before anybody can come: no client is to wait for them, nor to be told of a queue without a name.
        self._queue = await self.broker.in_thread(self.broker.store.brokers.queue)
        await self.broker.identity_key()
        advice = "is another broker there? choose another port, or stop that one"
        self._server = Acceptor(
            listen(self.listening.host, self.listening.port, "", advice),
            lambda: Connection(self),
            tls=self.listening.tls,
            handshakes=self.listening.handshakes,
            handshake_s=self.listening.unauthenticated_ms / 1000,
            tuning=self.listening.tuning,
        )
        self._brokers = (self._me(),)
        try:
            await self._be_known()
        except BaseException:  # the store went away: whoever tries again finds the port free
            await self.stop(0)
            raise
        self._duties = [asyncio.create_task(self._keep_entering()), asyncio.create_task(self._keep_ticking())]

    async def _be_known(self) -> None:
        await self._enter()
        await self.broker.presence.enter(f"broker {self.address}")

    async def stop(self, grace_ms: int = 10_000) -> None:
        """Take no more, end polls, let the rest end within the grace; then close."""
        if self._server is not None:
            self._server.close()
        for duty in self._duties:
            duty.cancel()
        await asyncio.gather(*self._duties, return_exceptions=True)
        try:
            await self.broker.in_thread(self._leave)
        except PostroomError as error:
            _log.warning("could not be taken from the list of brokers; it will be forgotten: %s", error)
        await end_all(self.connections, grace_ms)

    @property
    def port(self) -> int:
        assert self._server is not None, "it was started"
        return self._server.port

    @property
    def address(self) -> str:
        """Where clients find it."""
        return told_address(self.listening, self.port)

    @property
    def url(self) -> str:
        return f"postroom://{self.address}"

    # ---- among the brokers ----

    def _me(self) -> BrokerInfo:
        return BrokerInfo(self.id, self.address, self.listening.zone)

    async def _enter(self) -> None:
        brokers, ttl_ms = self.broker.store.brokers, self.listening.tuning.entered_ms

        def enter() -> list[BrokerInfo]:
            with self._entering:
                if not self._left:  # it may come here late
                    brokers.enter(self.id, self.address, self.listening.zone, self._started_at, ttl_ms)
            return [BrokerInfo(one.id, one.address, one.zone) for one in brokers.live()]

        self._brokers = tuple(await self.broker.in_thread(enter))

    async def enter_again(self) -> None:
        """Be listed from now on for as long as at the start; harmless if the store is away."""
        try:
            await self._enter()
        except PostroomError as error:
            _log.warning("the list of brokers cannot be kept now: %s", error)

    def _leave(self) -> None:
        with self._entering:
            self._left = True
            self.broker.store.brokers.leave(self.id)

    async def _keep_entering(self) -> None:
        while True:
            await asyncio.sleep(self.listening.tuning.enter_s)
            await self.enter_again()

    def broker_list(self) -> BrokerList:
        return BrokerList(self._brokers, self.broker.now_ms())

    # ---- connections ----

    def joined(self, connection: Connection) -> None:
        """Whoever has not said for longest who it is gives way: strangers keep no client out."""
        self.connections.add(connection)
        self._strangers[connection] = None
        if len(self.connections) > self.listening.max_connections:
            stranger = next(iter(self._strangers))
            del self._strangers[stranger]
            stranger.refuse(
                BrokerUnavailable(
                    f"this broker has {self.listening.max_connections} connections, which is its limit "
                    "(max_connections): ask another, or run more of them"
                )
            )

    def left(self, connection: Connection) -> None:
        self.connections.discard(connection)
        self._strangers.pop(connection, None)

    async def welcome(self, hello: Hello, connection: Connection, version: int) -> tuple[Session, Welcome]:
        principal = await self._gatekeeper.authenticate(
            hello.token or None,
            peer_is_loopback=connection.is_loopback,
            certificate_name=connection.certificate_name,
        )
        self._strangers.pop(connection, None)
        share = self.answers.share(principal.name)
        session = Session(self.broker, self._gatekeeper, principal, connection.client, share, self.listening)
        session.peer = connection.peer
        return session, Welcome(
            version, self.id, principal.name, self.broker.now_ms(), self.listening.max_frame_bytes,
            self._brokers, "postroom", self._queue, _OFFERS,
        )  # fmt: skip

    def freed(self) -> None:
        """A request ended: whoever was not read for want of room may be read again."""
        if self.short_of_room and self.held_bytes < self.listening.all_request_bytes:
            self.short_of_room = False
            for connection in list(self.connections):
                connection.throttle()

    def refused(self, peer: str, error: Exception) -> None:
        said = "a connection from %s was refused: %s"
        self._gatekeeper.refusals.say("greeting", _log, said, peer, error)

    async def _keep_ticking(self) -> None:
        while True:
            await asyncio.sleep(self.listening.tuning.tick_s)
            self._gatekeeper.refusals.tick()
            now = asyncio.get_running_loop().time()
            for connection in list(self.connections):
                try:
                    connection.tick(now)
                except Exception:  # its fault, and nobody else's
                    _log.exception("the connection of %s is closed", connection.client)
                    connection.abort()
