"""The files that a broker's process may open, compared with the connections that it may have.

The soft limit is raised to the hard one, which every process may do. Where that is not enough, fewer
connections are allowed than the settings say, and the log says so: a client that is told to ask another
broker knows more than one whose connection is reset.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import NamedTuple

from ..serve_settings import ServeSettings
from ..wire.accepting import HANDSHAKES
from ..wire.listening import Listening

__all__ = ["Fitted", "fit", "fitted", "raise_limit"]

log = logging.getLogger("postroom.serve")

_OWN = 100  # files of the process itself: the store's, the log, what Python has open
_HTTP = 1000
_LEAST = 8


class Fitted(NamedTuple):
    """How many connections there may be."""

    wire: int
    http: int
    handshakes: int  # on each port


def fit(settings: ServeSettings, listening: Listening) -> tuple[Listening, int]:
    """What to listen with, and the connections of HTTP; a log line if it is less than was asked for."""
    files = raise_limit()
    found = fitted(files, settings)
    if found.wire < settings.max_connections:
        log.warning(
            "this process may open %d files, which is too few for max_connections = %d: it takes %d, and "
            "%d of HTTP; raise the limit of open files (ulimit -n, LimitNOFILE), or lower max_connections",
            files, settings.max_connections, found.wire, found.http,
        )  # fmt: skip
    return replace(listening, max_connections=found.wire, handshakes=found.handshakes), found.http


def fitted(files: int | None, settings: ServeSettings) -> Fitted:
    """What fits; None: any number of files.

    >>> fitted(256, ServeSettings())
    Fitted(wire=117, http=39, handshakes=256)
    """
    handshakes = HANDSHAKES
    http = _HTTP if settings.http_port else 0
    if files is None:
        return Fitted(settings.max_connections, http, handshakes)
    room, ports = max(files - _OWN, 4 * _LEAST), 2 if settings.http_port else 1
    if settings.tls:
        handshakes = max(_LEAST, min(handshakes, room // 8))
        room -= ports * handshakes
    if settings.max_connections + http > room:
        http = min(http, max(_LEAST, room // 4)) if http else 0
    return Fitted(max(_LEAST, min(settings.max_connections, room - http)), http, handshakes)


def raise_limit() -> int | None:
    """The files that this process may open, after the limit was raised as far as it may; None: any number."""
    try:
        import resource
    except ImportError:  # pragma: no cover - Windows
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (OSError, ValueError):  # such as macOS, where the hard limit is not what is allowed
            pass
    return None if soft == resource.RLIM_INFINITY else soft
