"""The spools of one connection: producers that name the same file share it.

They are open until the connection is closed, so that what has landed goes on leaving when its producer is
done.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from ...broker.endpoint import Endpoint
from ...errors import InvalidSetting
from ...model.names import check_topic
from ...units import Duration, duration_ms, size_bytes
from ..guard import Guard

if TYPE_CHECKING:
    from .landing import Landing
    from .producer import SpooledProducer

__all__ = ["Spools", "limit_of", "place_of"]

log = logging.getLogger("postroom.spool")


class Spools:
    def __init__(self, endpoint: Endpoint, guard: Guard, client: str) -> None:
        self._endpoint, self._guard, self._client = endpoint, guard, client
        self._landings: dict[Path, tuple[Landing, int]] = {}

    def producer(
        self,
        topic: str,
        spool: str | Path,
        spool_bytes: int | str,
        *,
        timeout: Duration,
        buffer_bytes: int | str,
        confirm: bool,
    ) -> SpooledProducer:
        if not confirm:
            raise InvalidSetting(
                "confirm=False is for messages that may be lost, a spool for those that may not"
            )
        from .producer import SpooledProducer  # most programs have no spool

        return SpooledProducer(
            self._endpoint,
            self._guard,
            check_topic(topic),
            self._landing(place_of(spool), limit_of(spool_bytes)),
            timeout_ms=duration_ms(timeout, name="timeout"),
            buffer_bytes=size_bytes(buffer_bytes, name="buffer_bytes"),
        )

    def _landing(self, path: Path, limit: int) -> Landing:
        from .landing import Landing

        found = self._landings.get(path)
        if found is None:
            landing = Landing(path, limit)
            landing.forward(self._endpoint, self._client)
            found = self._landings[path] = landing, limit
        if found[1] != limit:
            raise InvalidSetting(
                f"spool_bytes={limit}: another producer of this connection has opened {path} with {found[1]}"
            )
        return found[0]

    async def close(self) -> None:
        closing = [landing.close() for landing, _ in self._landings.values()]
        for outcome in await asyncio.gather(*closing, return_exceptions=True):
            if isinstance(outcome, Exception):
                log.error("while a spool was closed: %r", outcome)


def place_of(spool: object) -> Path:
    if not isinstance(spool, str | Path) or not str(spool):
        raise InvalidSetting(f"spool={spool!r}: the path of a file, such as 'orders.spool'")
    return Path(spool).absolute()


def limit_of(spool_bytes: int | str) -> int:
    limit = size_bytes(spool_bytes, name="spool_bytes")
    if limit < 1:
        raise InvalidSetting("spool_bytes=0: a spool has room for something, such as '100 MB'")
    return limit
