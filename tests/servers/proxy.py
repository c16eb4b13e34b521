"""A TCP proxy that breaks on demand: the network between a client and its server, for tests of faults.

    cut()      every connection ends at once with a reset
    refuse()   new connections are refused; those that are open go on
    deaf()     bytes are taken and held back: both ends see a silent peer, as when a cable is pulled
    slow(s)    every piece of an answer comes so much later, as from a server whose disk is slow
    lead_to()  new connections go to another server
    heal()     all of that is over; what was held back arrives, as TCP delivers it when the cable is back

`deaf("answers")` lets requests through and holds the answers back. With a `cut()` after it the server has
done what it was asked, and the client cannot know: the fate of a COMMIT is open (I2, R34).
The proxy runs in a thread of its own; each call returns when its effect is there.

It owns every socket from accept() to its end, so that none is left open, whenever it is cut or closed: a
server of asyncio would not do, because it accepts in a task of its own, and a connection whose task has not
run yet is known to nobody.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Literal, Self, TypeVar

from .places import HOST, free_port

__all__ = ["Proxy"]

T = TypeVar("T")

_CHUNK = 64 * 1024


class Proxy:
    def __init__(self, target_port: int) -> None:
        self.port = free_port()
        self._target_port = target_port
        self._loop = asyncio.new_event_loop()
        self._requests, self._answers = _Gate(), _Gate()
        self._carriers: set[asyncio.Task[None]] = set()
        self._listening: socket.socket | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self.heal()

    @property
    def connections(self) -> int:
        """How many clients are connected through it."""
        return self._call(lambda: len(self._carriers))

    def cut(self) -> None:
        self._wait_for(self._reset_all())

    def refuse(self) -> None:
        self._wait_for(self._stop_listening())

    def deaf(self, to: Literal["both", "answers"] = "both") -> None:
        def shut() -> None:
            self._answers.shut()
            if to == "both":
                self._requests.shut()

        self._call(shut)

    def slow(self, seconds: float) -> None:
        """Each piece of an answer comes so much later."""
        self._answers.delay_s = seconds

    def heal(self) -> None:
        self._wait_for(self._mend())

    def lead_to(self, target_port: int) -> None:
        """New connections go to another server, as an address does that moves after a failover."""
        self._target_port = target_port

    def close(self) -> None:
        """May be called twice."""
        if self._thread.is_alive():
            self._wait_for(self._end())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- from the caller's thread into the proxy's ----------------------------------------------------

    def _wait_for(self, work: Coroutine[None, None, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=10)

    def _call(self, function: Callable[[], T]) -> T:
        async def work() -> T:
            return function()

        return self._wait_for(work())

    # --- in the proxy's thread ------------------------------------------------------------------------

    async def _mend(self) -> None:
        self._answers.delay_s = 0.0
        self._requests.open()
        self._answers.open()
        if self._listening is None:
            self._listening = socket.create_server((HOST, self.port), backlog=100)
            self._listening.setblocking(False)
            self._loop.add_reader(self._listening, self._accept, self._listening)

    async def _stop_listening(self) -> None:
        if self._listening is not None:
            self._loop.remove_reader(self._listening)
            self._listening.close()
            self._listening = None

    async def _reset_all(self) -> None:
        carriers = list(self._carriers)
        for carrier in carriers:
            carrier.cancel()
        await asyncio.gather(*carriers, return_exceptions=True)

    async def _end(self) -> None:
        await self._stop_listening()
        await self._reset_all()

    def _accept(self, listening: socket.socket) -> None:
        try:
            client, _ = listening.accept()
        except OSError:  # it has gone again
            return

        def ended(task: asyncio.Task[None]) -> None:
            self._carriers.discard(task)
            client.close()  # it is open only if the task was cancelled before its first step

        client.setblocking(False)
        _set_reset_on_close(client, True)
        carrier = self._loop.create_task(self._carry(client))
        self._carriers.add(carrier)
        carrier.add_done_callback(ended)

    async def _carry(self, client: socket.socket) -> None:
        """One client's connection, from start to end: a reset, unless both ends have hung up in order."""
        server = socket.socket()
        server.setblocking(False)
        _set_reset_on_close(server, True)
        writers: list[asyncio.StreamWriter] = []
        try:
            from_client, to_client = await _streams(client, writers)
            await self._loop.sock_connect(server, (HOST, self._target_port))
            from_server, to_server = await _streams(server, writers)
            await _both(
                _pump(from_client, to_server, self._requests), _pump(from_server, to_client, self._answers)
            )
            for end, writer in ((client, to_client), (server, to_server)):
                _set_reset_on_close(end, False)
                writer.close()
                await writer.wait_closed()
        except (OSError, asyncio.CancelledError):  # an end broke off, the target is down, or cut()
            pass
        finally:
            for writer in writers:
                writer.transport.abort()
            server.close()


class _Gate:
    """Bytes wait in front of it while it is shut, and for its delay."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self.delay_s = 0.0

    def open(self) -> None:
        self._open.set()

    def shut(self) -> None:
        self._open.clear()

    async def passed(self) -> None:
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        await self._open.wait()


async def _streams(
    end: socket.socket, writers: list[asyncio.StreamWriter]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """The writer is noted in `writers`: from then on the socket is its to close.

    Small pieces go on at once, as they came: asyncio sees to that only for sockets that name their protocol,
    and else every second piece would wait 40 ms for the peer's delayed acknowledgement of the first.
    """
    try:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        reader, writer = await asyncio.open_connection(sock=end, limit=_CHUNK)
    except BaseException:
        end.close()
        raise
    writers.append(writer)
    return reader, writer


async def _both(*pumps: Coroutine[None, None, None]) -> None:
    """Until both have come to their end; when one breaks, the other does not go on."""
    tasks = [asyncio.create_task(pump) for pump in pumps]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: _Gate) -> None:
    while data := await reader.read(_CHUNK):
        await gate.passed()
        writer.write(data)
        await writer.drain()
    await gate.passed()  # the end of the stream is news, too
    writer.write_eof()


def _set_reset_on_close(end: socket.socket, on: bool) -> None:
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", on, 0))
