"""Where connections are accepted: handshakes that do not end, and a process that has no file left."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from postroom.wire.server.listening import Acceptor, listen
from tests.certificates import Authority

SECONDS = 30
LOOPS = pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop])


class Echo(asyncio.Protocol):
    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)
        self.transport.close()


async def echoed(port: int, tls: ssl.SSLContext | None = None) -> bytes:
    async with asyncio.timeout(SECONDS):
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=tls, server_hostname="127.0.0.1" if tls else None
        )
        writer.write(b"hello")
        found = await reader.read()
        writer.close()
        return found


def accepting(**more: Any) -> Acceptor:
    return Acceptor(listen("127.0.0.1", 0, "", "choose another port"), Echo, **more)


@LOOPS
def test_an_answer_in_pieces_leaves_at_once(factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """Or the second waits for the acknowledgement of the first: 40 ms, of every answer over HTTP."""
    undelayed: list[bool] = []

    class Noted(Echo):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            line = transport.get_extra_info("socket")
            undelayed.append(line.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0)

    async def run() -> None:
        acceptor = Acceptor(listen("127.0.0.1", 0, "", "choose another port"), Noted)
        assert await echoed(acceptor.port) == b"hello"
        acceptor.close()
        await acceptor.wait_closed()

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(run())
    assert undelayed == [True]


@LOOPS
def test_the_oldest_handshake_gives_way_and_the_others_end_in_time(
    tmp_path: Path, factory: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    authority = Authority(tmp_path)
    own = authority.issue("broker")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(own.cert, own.key)

    async def run() -> None:
        acceptor = accepting(tls=tls, handshakes=3, handshake_s=1.0)
        async with AsyncExitStack() as stack:
            readers = []
            for _ in range(8):
                reader, writer = await asyncio.open_connection("127.0.0.1", acceptor.port)
                stack.callback(writer.close)
                readers.append(reader)
            trusting = ssl.create_default_context(cafile=authority.ca)
            assert await echoed(acceptor.port, trusting) == b"hello"
            async with asyncio.timeout(SECONDS):
                for reader in readers:
                    assert await reader.read() == b""
        acceptor.close()
        acceptor.close()  # harmless
        await acceptor.wait_closed()

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(run())


@contextmanager
def few_files(left: int) -> Iterator[None]:
    """This process may open so many more files, and no more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    probe = os.dup(0)  # the lowest that is free
    os.close(probe)
    resource.setrlimit(resource.RLIMIT_NOFILE, (probe + left, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@LOOPS
def test_no_file_left_is_said_once_and_the_port_comes_back(
    factory: Callable[[], asyncio.AbstractEventLoop], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "postroom.wire")

    async def run() -> None:
        loop = asyncio.get_running_loop()
        acceptor = accepting()
        assert await echoed(acceptor.port) == b"hello"
        reader, writer = await asyncio.open_connection("127.0.0.1", acceptor.port)
        with few_files(1):
            loop.call_soon(writer.write, b"again")  # whoever is here is served
            late = asyncio.create_task(echoed(acceptor.port))  # takes the last file: none for the other end
            async with asyncio.timeout(SECONDS):
                while not caplog.records:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                before = os.times()
                await asyncio.sleep(0.3)
                after = os.times()
            assert after.user + after.system - before.user - before.system < 0.2  # it does not spin
            assert await reader.read() == b"again"
        assert await late == b"hello"
        writer.close()
        acceptor.close()
        await acceptor.wait_closed()

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(run())
    (record,) = caplog.records
    assert "ulimit -n" in record.getMessage() and "max_connections" in record.getMessage()
