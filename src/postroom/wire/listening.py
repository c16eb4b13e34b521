"""What a server of brokers is set to, and what it gives everybody together."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field

__all__ = ["Listening"]


@dataclass(frozen=True, slots=True)
class Listening:
    host: str = "127.0.0.1"
    port: int = 7070  # 0: any that is free
    zone: str = ""
    advertise: str = ""  # host:port that clients are told; "": made from host and port
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    max_connections: int = 10_000
    handshakes: int = 256  # of TLS, under way
    max_frame_bytes: int = 16 * 1024 * 1024
    first_frame_bytes: int = 64 * 1024  # before a client is known
    unauthenticated_ms: int = 10_000  # a connection has to be greeted within this
    frame_ms: int = 30_000  # a frame that has begun has to be whole within this
    silent_ms: int = 60_000  # a connection on which nothing came for so long is closed
    requests_at_once: int = 512  # of one connection; more of them wait in its socket
    polls_at_once: int = 8192  # the same for those that wait for messages
    request_bytes: int = 64 * 1024 * 1024  # of one connection, under way
    answer_bytes: int = 256 * 1024 * 1024  # that the polls of one connection may bring together
    all_request_bytes: int = 256 * 1024 * 1024  # of all connections, under way
    ask_before_ms: int = 3_000  # before a lease ends its holder is asked (R19)
