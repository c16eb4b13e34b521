"""Whether the process lives, and whether it can do its work: for load balancers and orchestrators.

`/health` looks at nothing: a broker whose database is away must not be restarted for it. `/ready` writes to
the store, one row, one at a time however many ask, and remembers the answer for a second, good or bad: it is
open to anybody, and must cost the database next to nothing. A store that can be read and not written (a full
disk, a read-only one) is of no use to those who send.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import cast

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from ...errors import BrokerUnavailable, PostroomError, StoreBusy, StoreFull, StoreUnavailable
from ..failures import failure
from ..service import Service

__all__ = ["Readiness", "router"]

router = APIRouter(tags=["health"])

_log = logging.getLogger("postroom.http")

_ANSWER_S = 2.0
_REMEMBER_S = 1.0
_FULL_S = 10.0  # then somebody may try again
_DUTY = "ready"  # the row that is written: a lease that nobody needs
_LEASE_MS = 1  # so short that it is free for the next broker that writes
_WHY = {
    StoreFull.code: "the database has no space left: free some, or purge a topic",
    StoreBusy.code: "the database is locked by somebody else",
}


class Readiness:
    def __init__(self, service: Service, answer_s: float = _ANSWER_S) -> None:
        self._service, self._answer_s = service, answer_s
        self._asking: asyncio.Task[None] | None = None
        self._answered_at = float("-inf")
        self._why: PostroomError | None = None  # what it found last
        self._holder = f"ready-{secrets.token_hex(4)}"

    async def why_not(self) -> PostroomError | None:
        """Returns the reason why it is not ready; None if it is."""
        if self._service.stopping:
            return BrokerUnavailable("this broker is stopping: ask another")
        if time.monotonic() - self._answered_at < _REMEMBER_S:
            return self._why
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
            self._asking.add_done_callback(_looked_at)
        try:
            async with asyncio.timeout(self._answer_s):
                await asyncio.shield(self._asking)
        except TimeoutError:
            return StoreUnavailable(f"the store has not answered within {self._answer_s:g} seconds")
        return self._why

    async def _ask(self) -> None:
        """Says nothing of an address: there may be a password in it, and anybody may ask."""
        why: PostroomError | None = None
        try:
            await self._service.broker.in_thread(self._write)
        except PostroomError as error:
            said = _WHY.get(error.code, f"the store does not answer as it should ({error.code})")
            why = StoreUnavailable(f"nothing can be written: {said}; the broker's log has more")
            if self._why is None:
                _log.warning("not ready, nothing can be written: %s", error)
        if why is None and self._why is not None:
            _log.info("ready again")
        self._why, self._answered_at = why, time.monotonic()

    def _write(self) -> None:
        """A row may find room on a disk where messages do not: what appends met lately counts, too."""
        if time.monotonic() - self._service.figures.full_at < _FULL_S:
            raise StoreFull("an append found no space, and nothing was stored since")
        self._service.broker.store.duties.acquire(_DUTY, self._holder, _LEASE_MS)


def _looked_at(done: asyncio.Task[None]) -> None:
    if not done.cancelled():
        done.exception()  # whoever waited for it may be gone


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health() -> dict[str, str]:
    """The process lives."""
    return {"status": "ok"}


@router.head("/ready", include_in_schema=False)
@router.get("/ready", response_model=dict[str, str])
async def ready(request: Request) -> JSONResponse:
    """Something can be written, and the broker is not about to stop; 503 with the reason otherwise."""
    error = await cast(Readiness, request.app.state.readiness).why_not()
    return JSONResponse({"status": "ready"}) if error is None else failure(error)
