"""A simulated network under the real protocol: streams between processes of machines that may be cut off.

A stream is what TCP gives: bytes in order, in pieces of any size, late by any time, or the end of it. Loss
is delay. While two machines are cut off from each other, bytes wait, and nobody is told; a process that is
killed resets its streams, a machine without power does not: the other side finds out when it writes, or
never.
"""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from collections.abc import Callable
from typing import Any

from .world import Process, World, current_world, here

__all__ = ["Listener", "Network", "Transport", "connect", "listen"]

_PORTS = 20_000


class Network:
    def __init__(self, world: World) -> None:
        self._world = world
        self.listeners: dict[tuple[str, int], Listener] = {}
        self.cuts: set[frozenset[str]] = set()
        self.transports: list[Transport] = []
        self.slow_s = 0.0002  # a usual delay
        self.dark: set[str] = set()  # machines without power: they answer nothing
        self.lost_in = 0  # the reply to this one of the next requests is lost; 0: none is
        self._ports = _PORTS

    def port(self) -> int:
        self._ports += 1
        return self._ports

    def reachable(self, one: str, other: str) -> bool:
        return frozenset((one, other)) not in self.cuts and not {one, other} & self.dark

    def delay_ns(self) -> int:
        """Most are short; some wait for a packet that was lost and is sent again."""
        chance = self._world.draw.random()
        slow = self.slow_s * (0.5 + self._world.draw.random())
        return int(1e9 * (slow if chance < 0.97 else slow + 0.2 * self._world.draw.random()))

    def cut(self, one: str, other: str) -> None:
        self.cuts.add(frozenset((one, other)))

    def heal(self) -> None:
        self.cuts.clear()
        for transport in list(self.transports):
            transport.flush()

    def break_one(self) -> bool:
        """Reset a stream, at one side only: the other learns of it when it writes."""
        live = [one for one in self.transports if not one.closed and one.peer is not None]
        if not live:
            return False
        one = live[int(self._world.draw.random() * len(live))]
        self._world.trace(f"the stream of {one.process} to {one.other} breaks at one side")
        one.lose(ConnectionResetError(errno.ECONNRESET, "reset"))
        return True


class Listener:
    """What a listening socket is to `wire/server/listening.py`."""

    def __init__(self, network: Network, process: Process, host: str, port: int) -> None:
        self._network, self.process, self._at = network, process, (host, port or network.port())
        self._waiting: deque[Transport] = deque()
        self._accepting: asyncio.Future[Any] | None = None
        network.listeners[self._at] = self
        process.on_death.append(self.close)

    def getsockname(self) -> tuple[str, int]:
        return self._at

    def setblocking(self, flag: bool) -> None:
        pass

    def close(self) -> None:
        if self._network.listeners.get(self._at) is self:
            del self._network.listeners[self._at]

    async def accept(self, loop: Any) -> tuple[Any, Any]:
        while not self._waiting:
            self._accepting = loop.create_future()
            self._loop = loop
            await self._accepting
        return self._waiting.popleft(), ("127.0.0.1", 1)

    def offer(self, transport: Transport) -> None:
        self._waiting.append(transport)
        if self._accepting is not None:
            self._loop.deliver(_done, self._accepting)


def _done(future: asyncio.Future[Any]) -> None:
    if not future.done():
        future.set_result(None)


class Transport(asyncio.Transport):
    """One end of a stream."""

    def __init__(self, network: Network, world: World, process: Process) -> None:
        super().__init__()
        self._network, self._world, self.process = network, world, process
        self.peer: Transport | None = None
        self.closed = self.asks = False
        self._loop: Any = None
        self._protocol: Any = None
        self._last_ns = 0
        self._unsent: deque[bytes] = deque()  # cut off
        self._early: list[bytes] = []  # before there is a protocol, or while it does not read
        self._reading = True
        self._ended: Exception | bool | None = False
        process.on_death.append(self._killed)
        network.transports.append(self)

    @property
    def other(self) -> str:
        return self.peer.process.name if self.peer is not None else "nobody"

    def adopt(self, loop: Any, protocol: Any) -> tuple[Transport, Any]:
        self._loop, self._protocol = loop, protocol
        protocol.connection_made(self)
        self.resume_reading()
        if self._ended is not False:
            loop.call_soon(self._tell, self._ended)
        return self, protocol

    # ---- what protocols use ----

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name == "peername" else default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return sum(map(len, self._unsent))

    def is_closing(self) -> bool:
        return self.closed

    def write(self, data: Any) -> None:
        if self.closed or not data:
            return
        self._unsent.append(bytes(data))
        self.flush()
        if self.asks and self._network.lost_in:
            self._network.lost_in -= 1
            if not self._network.lost_in:
                self._world.trace(f"the reply of {self.other} to {self.process} is lost")
                self._world.call_later(0, lambda: self.lose(ConnectionResetError(errno.ECONNRESET, "reset")))

    def writelines(self, pieces: Any) -> None:
        self.write(b"".join(pieces))

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True
        early, self._early = self._early, []
        for data in early:
            self._loop.call_soon(self._received, data)

    def is_reading(self) -> bool:
        return self._reading

    def close(self) -> None:
        """What was written arrives, then the other side is told."""
        if not self.closed:
            self._end(None)
            self._loop.call_soon(self._tell, None)

    def abort(self) -> None:
        self.close()

    # ---- the wire ----

    def flush(self) -> None:
        peer = self.peer
        if peer is None or not self._network.reachable(self.process.machine, peer.process.machine):
            return
        while self._unsent:
            data = self._unsent.popleft()
            if peer.closed:  # half open, until now
                self._world.call_later(
                    0.001, lambda: self.lose(ConnectionResetError(errno.ECONNRESET, "reset"))
                )
                return
            if len(data) > 1 and self._world.draw.random() < 0.1:
                at = 1 + int(self._world.draw.random() * (len(data) - 1))
                self._send(data[:at])
                data = data[at:]
            self._send(data)

    def _send(self, data: bytes) -> None:
        peer = self.peer
        assert peer is not None
        self._last_ns = max(self._last_ns, self._world.now_ns + self._network.delay_ns())
        self._world.call_at(self._last_ns, lambda: peer.arrive(data))

    def arrive(self, data: bytes) -> None:
        if self.closed or not self.process.alive:
            return
        if self._loop is None or not self._reading:
            self._early.append(data)
        else:
            self._loop.deliver(self._received, data)

    def _received(self, data: bytes) -> None:
        if self.closed:
            return
        if not self._reading:
            self._early.append(data)
        else:
            self._protocol.data_received(data)

    def _end(self, error: Exception | None) -> None:
        """This side has ended; the other is told if it can be."""
        self.closed = True
        peer, network = self.peer, self._network
        if peer is not None and network.reachable(self.process.machine, peer.process.machine):
            at = max(self._last_ns, self._world.now_ns + network.delay_ns())
            self._world.call_at(at, lambda: peer.lose(error))

    def lose(self, error: Exception | None) -> None:
        """Its protocol is told that it ended; the other side is not."""
        if self.closed:
            return
        self.closed = True
        if not self.process.alive:
            return
        if self._loop is None:
            self._ended = error
        else:
            self._loop.deliver(self._tell, error)

    def _tell(self, error: Any) -> None:
        protocol, self._protocol = self._protocol, _Nobody()
        protocol.connection_lost(error)
        if self in self._network.transports:
            self._network.transports.remove(self)

    def _killed(self) -> None:
        if not self.closed:
            self._end(ConnectionResetError(errno.ECONNRESET, "reset"))
            if self in self._network.transports:
                self._network.transports.remove(self)


class _Nobody:
    def connection_lost(self, error: Any) -> None:
        pass

    def data_received(self, data: bytes) -> None:
        pass


async def connect(
    loop: Any, world: World, process: Process, factory: Callable[[], Any], host: str, port: int
) -> tuple[Transport, Any]:
    network: Network = world.network  # type: ignore[attr-defined]
    await asyncio.sleep(network.delay_ns() / 1e9)
    listener = network.listeners.get((host, port))
    if not network.reachable(process.machine, host):
        await asyncio.sleep(75)
        raise TimeoutError(errno.ETIMEDOUT, "no answer")
    if listener is None or not listener.process.alive:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")
    mine, theirs = Transport(network, world, process), Transport(network, world, listener.process)
    mine.peer, theirs.peer, mine.asks = theirs, mine, True
    listener.offer(theirs)
    return mine.adopt(loop, factory())


def listen(host: str, port: int, what: str, advice: str) -> list[Any]:
    """`wire.server.listening.listen`."""
    fiber, world = here(), current_world()
    assert fiber is not None, "a process listens"
    return [Listener(world.network, fiber.process, host, port)]  # type: ignore[attr-defined]
