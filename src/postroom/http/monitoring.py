"""What monitors ask over HTTP: whether the process lives, whether it can do its work, and its figures.

`/health` looks at nothing: a broker whose database is away must not be restarted for it. `/ready` writes to
the store, one row, one at a time however many ask, and remembers the answer for a second, good or bad: it is
open to anybody, and must cost the database next to nothing. A store that can be read and not written (a full
disk, a read-only one) is of no use to those who send.

`/metrics` shows the broker's figures (`broker.exposition`), and those of the server around it. Decides who
sees which names.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Protocol, cast

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from ..broker.exposition import Sampler, of_counts, of_groups, of_process
from ..broker.metrics import OTHER
from ..config import DEFAULTS, HttpTuning
from ..errors import BrokerUnavailable, PostroomError, StoreBusy, StoreFull, StoreUnavailable
from ..metrics import CONTENT_TYPE, Family, Sample, single
from ..metrics import Metrics as Collection
from ..model.access import Principal, allows, visible
from .failures import failure
from .service import Service

__all__ = [
    "METRICS",
    "Collector",
    "Metrics",
    "Named",
    "Readiness",
    "health_router",
    "metrics_router",
    "sees_all",
]


health_router = APIRouter(tags=["health"])

_log = logging.getLogger("postroom.http")

_DUTY = "ready"  # the row that is written: a lease that nobody needs
_WHY = {
    StoreFull.code: "the database has no space left: free some, or purge a topic",
    StoreBusy.code: "the database is locked by somebody else",
}


class Readiness:
    def __init__(self, service: Service, tuning: HttpTuning = DEFAULTS.tuning.http) -> None:
        self._service, self._tuning = service, tuning
        self._asking: asyncio.Task[None] | None = None
        self._answered_at = float("-inf")
        self._why: PostroomError | None = None  # what it found last
        self._holder = f"ready-{secrets.token_hex(4)}"

    async def why_not(self) -> PostroomError | None:
        """Returns the reason why it is not ready; None if it is."""
        if self._service.stopping:
            return BrokerUnavailable("this broker is stopping: ask another")
        if time.monotonic() - self._answered_at < self._tuning.ready_fresh_s:
            return self._why
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
            self._asking.add_done_callback(_looked_at)
        try:
            async with asyncio.timeout(self._tuning.ready_answer_s):
                await asyncio.shield(self._asking)
        except TimeoutError:
            return StoreUnavailable(
                f"the store has not answered within {self._tuning.ready_answer_s:g} seconds"
            )
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
        if time.monotonic() - self._service.figures.full_at < self._tuning.full_s:
            raise StoreFull("an append found no space, and nothing was stored since")
        self._service.broker.store.duties.acquire(_DUTY, self._holder, self._tuning.ready_lease_ms)


def _looked_at(done: asyncio.Task[None]) -> None:
    if not done.cancelled():
        done.exception()  # whoever waited for it may be gone


@health_router.head("/health", include_in_schema=False)
@health_router.get("/health")
async def health() -> dict[str, str]:
    """The process lives."""
    return {"status": "ok"}


@health_router.head("/ready", include_in_schema=False)
@health_router.get("/ready", response_model=dict[str, str])
async def ready(request: Request) -> JSONResponse:
    """Something can be written, and the broker is not about to stop; 503 with the reason otherwise."""
    error = await cast(Readiness, request.app.state.readiness).why_not()
    return JSONResponse({"status": "ready"}) if error is None else failure(error)


# ---- names ----
# A scrape shows the names of topics and groups to those who would see them in a list: of a topic one has a
# permission on, and of all to whoever has one on `_metrics`, which `*` includes. Everything else is added up
# as `(other)`, so that totals are right for anybody. Ages and debts of others are the largest of them.

METRICS = "_metrics"
"""A topic that nobody has: a permission on it is one to see all names in figures."""

_NAMES = ("topic", "group", "producer")
_LARGEST = ("_age_seconds", "_debt_seconds")


class Collected(Protocol):
    def collect(self) -> Iterable[Family]: ...


def sees_all(principal: Principal) -> bool:
    return allows(principal, "any", METRICS)


class Named:
    """A collector that shows names as this principal may see them."""

    def __init__(self, collected: Collected, principal: Principal) -> None:
        self._collected, self._principal = collected, principal
        self._shown: dict[str, bool] = {OTHER: True}

    def collect(self) -> Iterator[Family]:
        for family in self._collected.collect():
            if any("topic" in sample.labels for sample in family.samples):
                family = replace(family, samples=self._named(family.samples))
            yield family

    def _named(self, samples: Iterable[Sample]) -> list[Sample]:
        found: dict[tuple[str, tuple[tuple[str, str], ...]], Sample] = {}
        for sample in samples:
            if not self._shows(sample.labels.get("topic", "")):
                labels = {name: OTHER if name in _NAMES else value for name, value in sample.labels.items()}
                sample = replace(sample, labels=labels)
            key = (sample.name, tuple(sorted(sample.labels.items())))
            if (before := found.get(key)) is not None:
                add = _adding(sample.name)
                sample = replace(sample, value=add((before.value, sample.value)))
            found[key] = sample
        return list(found.values())

    def _shows(self, topic: str) -> bool:
        shown = self._shown.get(topic)
        if shown is None:
            shown = self._shown[topic] = bool(topic) and bool(visible(self._principal, [topic]))
        return shown


def _adding(name: str) -> Callable[[Iterable[float]], float]:
    return max if name.endswith(_LARGEST) else sum


# ---- metrics ----

metrics_router = APIRouter(tags=["metrics"])


class Collector:
    """What a served broker shows."""

    def __init__(self, service: Service, sampler: Sampler) -> None:
        self._service, self._sampler = service, sampler

    def collect(self) -> Iterator[Family]:
        yield from of_counts(self._service.figures)
        yield from of_groups(self._sampler)
        yield from self._server()
        yield from of_process(self._service.broker, self._service.figures.started_at)

    def _server(self) -> Iterator[Family]:
        service = self._service
        server, answers = service.server, service.answers
        connections = len(server.connections) if server is not None else 0
        limit = server.listening.max_connections if server is not None else 0
        yield single("connections", "Connections of clients, without HTTP.", connections)
        yield single("connections_limit", "Connections that are allowed.", limit)
        yield single("answer_bytes", "Bytes of answers being made, or not read yet.", answers.held)
        yield single("answer_bytes_limit", "Bytes of answers that are allowed.", answers.most)
        yield single("answers_waiting", "Requests that wait for room for their answer.", answers.waiting)
        yield single("stopping", "1: this broker is about to stop.", float(service.stopping))


class Metrics:
    def __init__(self, service: Service, sampler: Sampler) -> None:
        self.sampler = sampler
        self._turn = asyncio.Lock()
        self.collector = Collector(service, sampler)

    async def text(self, principal: Principal) -> str:
        """Written in a thread, one after the other: with thousands of topics it takes its time."""
        await self.sampler.sample()
        shown: Collected = self.collector if sees_all(principal) else Named(self.collector, principal)
        async with self._turn:
            return await asyncio.to_thread(lambda: Collection(shown.collect()).text)


@metrics_router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Figures for Prometheus, for any principal; names of topics for those who may see them."""
    found = cast(Metrics, request.app.state.metrics)
    text = await found.text(request.scope["state"]["principal"])
    return Response(text, media_type=CONTENT_TYPE)
