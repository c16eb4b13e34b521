"""RabbitMQ: a quorum queue, whose write-ahead log is flushed before each confirmation."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from postroom.errors import how_to_install
from tests.servers.places import free_port

from .peer import HOST, NotInstalled, Peer, ServerProcess, program

try:
    import aio_pika
except ImportError:
    aio_pika = None

__all__ = ["RabbitMQ"]

HOMES = (
    "/usr/lib/rabbitmq/bin",
    "/usr/sbin",
    "/usr/local/sbin",
)  # Debian's first: the one in sbin wants its user
PERSISTENT = 2  # of AMQP's delivery modes
HOW = "apt-get install rabbitmq-server (or, as root: make peers)"


class RabbitMQ(Peer):
    name = "rabbitmq"
    how = "quorum queue (flushes its log); aio-pika, 1,000 unconfirmed; prefetch 2,000, multiple acks sent"
    batch = 250
    at_once = 4

    @contextmanager
    def serve(self) -> Iterator[str]:
        if aio_pika is None:
            raise NotInstalled(f"not installed: {how_to_install('bench')}")
        plain = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")  # Debian's in sbin runs as a user of its own
        binary = str(plain) if plain.exists() else program("rabbitmq-server", HOW)
        with ServerProcess("epmd") as names, ServerProcess("rabbitmq") as server:
            # Erlang starts a daemon of names that stays; given one, it starts none.
            names_port, port = free_port(), free_port()
            names.start([program("epmd", HOW), "-port", str(names_port), "-address", HOST], names_port)
            server.start([binary], port, _settings(server.folder, port, names_port), timeout_s=90)
            yield f"amqp://guest:guest@{HOST}:{port}/"

    async def create(self, address: str, queue: str) -> None:
        async with await aio_pika.connect(address) as connection:
            channel = await connection.channel()
            await channel.declare_queue(queue, durable=True, arguments={"x-queue-type": "quorum"})

    async def publisher(self, address: str, queue: str, *, paced: bool) -> _Publisher:
        connection = await aio_pika.connect(address)
        return _Publisher(connection, await connection.channel(publisher_confirms=True), queue)

    async def taker(self, address: str, queue: str) -> _Taker:
        connection = await aio_pika.connect(address)
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=2000)
        taker = _Taker(connection)
        await (await channel.get_queue(queue)).consume(taker.arrived.put)
        return taker


def _settings(folder: Path, port: int, names_port: int) -> dict[str, str]:
    """All it writes goes into `folder`, none of the system's settings is read, and it replaces its shell."""
    (plugins := folder / "plugins").write_text("[].")
    return {
        "HOME": str(folder),
        "RABBITMQ_NODENAME": f"bench{port}@localhost",
        "RABBITMQ_NODE_IP_ADDRESS": HOST,
        "RABBITMQ_NODE_PORT": str(port),
        "RABBITMQ_DIST_PORT": str(free_port()),
        "RABBITMQ_MNESIA_BASE": str(folder / "mnesia"),
        "RABBITMQ_LOG_BASE": str(folder / "logs"),
        "RABBITMQ_PID_FILE": str(folder / "rabbitmq.pid"),
        "RABBITMQ_CONF_ENV_FILE": str(folder / "env.conf"),
        "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(plugins),
        "RUNNING_UNDER_SYSTEMD": "true",
        "ERL_EPMD_PORT": str(names_port),
        "ERL_EPMD_ADDRESS": HOST,
    }


class _Publisher:
    def __init__(self, connection: Any, channel: Any, queue: str) -> None:
        self._connection, self._exchange, self._queue = connection, channel.default_exchange, queue

    async def publish(self, values: list[bytes]) -> int:
        messages = (aio_pika.Message(value, delivery_mode=PERSISTENT) for value in values)
        return len(await asyncio.gather(*(self._exchange.publish(m, self._queue) for m in messages)))

    async def close(self) -> None:
        await self._connection.close()


class _Taker:
    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.arrived: asyncio.Queue[Any] = asyncio.Queue()

    async def take(self) -> tuple[list[bytes], Any]:
        try:
            messages = [await asyncio.wait_for(self.arrived.get(), 1)]
        except TimeoutError:
            return [], None
        while not self.arrived.empty() and len(messages) < 500:
            messages.append(self.arrived.get_nowait())
        return [message.body for message in messages], messages[-1]

    async def ack(self, token: Any) -> None:
        await token.ack(multiple=True)

    async def close(self) -> None:
        await self._connection.close()
