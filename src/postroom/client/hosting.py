"""A program that hosts its own queue for others (R8): the server of one broker, until it is closed."""

from __future__ import annotations

import asyncio
import secrets
from ipaddress import ip_address
from types import TracebackType
from typing import TYPE_CHECKING, Self

from ..broker.access import Gatekeeper
from ..broker.broker import Broker
from ..clock import SystemClock
from ..errors import InvalidSetting, NotAuthenticated
from ..model.access import ALL, Principal
from ..wire.server.listening import Listening
from ..wire.server.server import WireServer

if TYPE_CHECKING:
    from ..kafka.server import KafkaServer

__all__ = ["Served"]


class Served:
    def __init__(self, server: WireServer, kafka: KafkaServer | None = None) -> None:
        self._server, self._kafka = server, kafka
        self._closing: asyncio.Task[None] | None = None

    @classmethod
    async def _start(
        cls, broker: Broker, listening: Listening, token: str | None, kafka: Listening | None = None
    ) -> Self:
        """`kafka`: where Kafka clients are listened for; None: nowhere."""
        if token is None and not _is_loopback(listening.host) and not await _has_principals(broker):
            raise InvalidSetting(
                f"serve({listening.host!r}) lets others in: give it a token=, which they give to connect(), "
                "or make one with `postroom access add`"
            )
        door = _Door(broker, token, dev=_is_loopback(listening.host))
        server = WireServer(broker, listening, door)
        beside = None
        if kafka is not None:
            from ..kafka.server import KafkaServer

            beside = KafkaServer(broker, kafka, door, server.answers)
        await server.start()
        if beside is not None:
            try:
                await beside.start()
            except BaseException:
                await server.stop(0)
                raise
        return cls(server, beside)

    @property
    def url(self) -> str:
        """What others connect to."""
        return self._server.url

    @property
    def port(self) -> int:
        return self._server.port

    @property
    def kafka(self) -> str | None:
        """The address (host:port) that Kafka clients connect to; None: nobody listens for them."""
        return None if self._kafka is None else self._kafka.address

    @property
    def closed(self) -> bool:
        return self._closing is not None

    async def close(self) -> None:
        """Let requests under way end, then let go of everybody. Once more is harmless."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._stop())
        await asyncio.shield(self._closing)

    async def _stop(self) -> None:
        doors = [self._server.stop()] + ([] if self._kafka is None else [self._kafka.stop()])
        await asyncio.gather(*doors)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class _Door(Gatekeeper):
    """One token for all, given by the program; and whoever the store knows."""

    def __init__(self, broker: Broker, token: str | None, *, dev: bool) -> None:
        super().__init__(broker.store, broker.in_thread, SystemClock(), dev=dev and token is None)
        self._token = token
        self._guest = Principal("guest", ALL)

    async def authenticate(
        self, token: str | None, *, peer_is_loopback: bool, certificate_name: str | None = None
    ) -> Principal:
        if self._token is not None and token and secrets.compare_digest(token.encode(), self._token.encode()):
            return self._guest
        if self._token is not None and not token:
            raise NotAuthenticated("this queue asks for a token: connect(url, token=…)")
        return await super().authenticate(
            token, peer_is_loopback=peer_is_loopback, certificate_name=certificate_name
        )

    async def current(self, principal: Principal) -> Principal:
        return principal if principal is self._guest else await super().current(principal)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


async def _has_principals(broker: Broker) -> bool:
    return bool(await broker.in_thread(broker.store.access.principals))
