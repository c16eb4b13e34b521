"""A TCP proxy that breaks on demand: the network between a client and its server, for tests of faults.

    cut()      every connection ends at once with a reset
    refuse()   new connections are refused; those that are open go on
    deaf()     bytes are taken and held back: both ends see a silent peer, as when a cable is pulled
    heal()     all of that is over; what was held back arrives, as TCP delivers it when the cable is back

`deaf("answers")` lets requests through and holds the answers back. With a `cut()` after it the server has
done what it was asked, and the client cannot know: the fate of a COMMIT is open (I2, R34).
The proxy runs in a thread of its own; each call returns when its effect is there.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from asyncio.trsock import TransportSocket
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
        self._server: asyncio.Server | None = None
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

    def heal(self) -> None:
        self._wait_for(self._mend())

    def close(self) -> None:
        """May be called twice."""
        if self._thread.is_alive():
            self._wait_for(self._end())
            self._wait_for(self._leave_nothing())
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

    async def _leave_nothing(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.sleep(0.01)  # transports close in a later turn of the loop

    async def _mend(self) -> None:
        self._requests.open()
        self._answers.open()
        if self._server is None:
            self._server = await asyncio.start_server(self._accept, HOST, self.port, limit=_CHUNK)

    async def _stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _reset_all(self) -> None:
        carriers = list(self._carriers)
        for carrier in carriers:
            carrier.cancel()
        await asyncio.gather(*carriers, return_exceptions=True)

    async def _end(self) -> None:
        await self._stop_listening()
        await self._reset_all()

    def _accept(self, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        """A carrier that is cancelled before its first step leaves no connection open either."""

        def ended(task: asyncio.Task[None]) -> None:
            self._carriers.discard(task)
            if not to_client.transport.is_closing():
                _reset(to_client)

        carrier = self._loop.create_task(self._carry(from_client, to_client))
        self._carriers.add(carrier)
        carrier.add_done_callback(ended)

    async def _carry(self, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        """One client's connection, from start to end."""
        writers = [to_client]
        try:
            from_server, to_server = await _dial(self._target_port)
            writers.append(to_server)
            await _both(
                _pump(from_client, to_server, self._requests), _pump(from_server, to_client, self._answers)
            )
            for writer in writers:
                writer.close()
                await writer.wait_closed()
        except (OSError, asyncio.CancelledError):  # an end broke off, the target is down, or cut()
            for writer in writers:
                _reset(writer)


class _Gate:
    """Bytes wait in front of it while it is shut."""

    def __init__(self) -> None:
        self._open = asyncio.Event()

    def open(self) -> None:
        self._open.set()

    def shut(self) -> None:
        self._open.clear()

    async def passed(self) -> None:
        await self._open.wait()


async def _dial(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that ends with a reset if we are cut off while it is being made."""
    dialling = socket.socket()
    try:
        dialling.setblocking(False)
        _set_reset_on_close(dialling, True)
        await asyncio.get_running_loop().sock_connect(dialling, (HOST, port))
        reader, writer = await asyncio.open_connection(sock=dialling, limit=_CHUNK)
    except BaseException:
        dialling.close()
        raise
    _set_reset_on_close(dialling, False)
    return reader, writer


async def _both(*pumps: Coroutine[None, None, None]) -> None:
    """Until both have come to their end; when one breaks, the other does not go on."""
    tasks = [asyncio.create_task(pump) for pump in pumps]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: _Gate) -> None:
    while data := await reader.read(_CHUNK):
        await gate.passed()
        writer.write(data)
        await writer.drain()
    await gate.passed()  # the end of the stream is news, too
    writer.write_eof()


def _reset(writer: asyncio.StreamWriter) -> None:
    if not writer.transport.is_closing():
        _set_reset_on_close(writer.get_extra_info("socket"), True)
    writer.transport.abort()


def _set_reset_on_close(end: socket.socket | TransportSocket, on: bool) -> None:
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", on, 0))
