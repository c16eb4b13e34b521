"""Whether the process lives, and whether it can do its work: for load balancers and orchestrators.

`/health` looks at nothing: a broker whose database is away must not be restarted for it. `/ready` asks the
store, one question at a time however many ask, and remembers the answer for a second: it is open to
anybody, and must cost the database nothing.
"""

from __future__ import annotations

import asyncio
import time
from typing import cast

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from ..errors import BrokerUnavailable, PostroomError, StoreUnavailable
from .failures import failure
from .service import Service

__all__ = ["Readiness", "router"]

router = APIRouter(tags=["health"])

_ANSWER_S = 2.0
_REMEMBER_S = 1.0


class Readiness:
    def __init__(self, service: Service, answer_s: float = _ANSWER_S) -> None:
        self._service, self._answer_s = service, answer_s
        self._asking: asyncio.Task[None] | None = None
        self._answered_at = 0.0

    async def why_not(self) -> PostroomError | None:
        """None: it is ready."""
        if self._service.stopping:
            return BrokerUnavailable("this broker is stopping: ask another")
        if time.monotonic() - self._answered_at < _REMEMBER_S:
            return None
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
            self._asking.add_done_callback(_looked_at)
        try:
            async with asyncio.timeout(self._answer_s):
                await asyncio.shield(self._asking)
        except TimeoutError:
            return StoreUnavailable(f"the store has not answered within {self._answer_s:g} seconds")
        except PostroomError as error:
            return StoreUnavailable(f"the store does not answer as it should ({error.code}): see the log")
        return None

    async def _ask(self) -> None:
        broker = self._service.broker
        await broker.in_thread(broker.store.brokers.live)
        self._answered_at = time.monotonic()


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
    """The store answers, and the broker is not about to stop; 503 with the reason otherwise."""
    error = await cast(Readiness, request.app.state.readiness).why_not()
    return JSONResponse({"status": "ready"}) if error is None else failure(error)
