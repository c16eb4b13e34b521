"""A client in sixty lines, written from docs/PROTOCOL.md alone: a socket, MessagePack, and batches.

Nothing of `postroom.wire` is imported: what works here works in any language.
"""

from __future__ import annotations

import socket
import struct
from typing import Any

from msgspec import msgpack

__all__ = ["MiniClient", "MiniError"]

PREFIX = struct.Struct(">IIIBBH")  # length, id, header length, kind, flags, reserved
REPLY, ERROR = 1, 2
HELLO, BROKERS, APPEND, SUBSCRIBE, POLL, SETTLE, CREATE_TOPIC, ROUTE = 1, 3, 10, 20, 22, 23, 30, 40


class MiniError(Exception):
    @property
    def code(self) -> str:
        return str(self.args[0][0])


class MiniClient:
    def __init__(self, host: str, port: int, token: str = "") -> None:
        self._socket = socket.create_connection((host, port), timeout=20)
        self._last_id = 0
        self.welcome, _ = self.ask(HELLO, [1, 1, "mini", token, "mini-client 1"])

    def ask(self, kind: int, header: Any, body: bytes = b"") -> tuple[Any, bytes]:
        self._last_id += 1
        packed = msgpack.encode(header)
        size = PREFIX.size - 4 + len(packed) + len(body)
        self._socket.sendall(PREFIX.pack(size, self._last_id, len(packed), kind, 0, 0) + packed + body)
        while True:
            size, id, header_size, _, flags, _ = PREFIX.unpack(self._read(PREFIX.size))
            rest = self._read(size - PREFIX.size + 4)
            if flags & REPLY and id in (0, self._last_id):  # 0: of the connection, which ends
                found = msgpack.decode(rest[:header_size])
                if flags & ERROR:
                    raise MiniError(found)
                return found, rest[header_size:]

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self._socket.recv(size - len(data))
            if not more:
                raise EOFError("the broker closed the connection")
            data += more
        return data

    def close(self) -> None:
        self._socket.close()

    # ---- what it can do ----

    def create_topic(self, name: str, partitions: int) -> Any:
        return self.ask(CREATE_TOPIC, [name, {}, partitions, False])[0]

    def partition_id(self, topic: str, slot: int) -> int:
        route = self.ask(ROUTE, [topic])[0]
        ranges = (one for one in route["ranges"] if one["first_slot"] <= slot <= one["last_slot"])
        return int(next(ranges)["partition_id"])

    def append(self, topic: str, partition_id: int, batch: bytes) -> Any:
        return self.ask(APPEND, [topic, partition_id], batch)[0]

    def subscribe(self, topic: str, group: str, member: str) -> Any:
        return self.ask(SUBSCRIBE, [topic, group, {}, member, "mini"])[0]

    def poll(self, topic: str, group: str, member: str, token: int, wait_ms: int = 5000) -> Any:
        """Grants, each with the batches that its leases are in."""
        head, body = self.ask(POLL, [{
            "topic": topic, "group": group, "member": member, "token": token, "messages": 100,
            "bytes": 1 << 20, "wait_ms": wait_ms, "empty_handed": True,
        }])  # fmt: skip
        found, at = [], 0
        for _, _, partition_id, leases, batches, *_ in head[0]:
            data = []
            for base_offset, _, _, size in batches:
                data.append((base_offset, body[at : at + size]))
                at += size
            found.append((partition_id, leases, data))
        return found

    def ack(self, topic: str, group: str, partition_id: int, token: int, first: int, last: int) -> Any:
        verdicts = [{"kind": "ack", "first": first, "last": last}]
        part = {"topic": topic, "partition_id": partition_id, "token": token, "verdicts": verdicts}
        return self.ask(SETTLE, [topic, group, [part]])[0]
