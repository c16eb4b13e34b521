"""Background work: small services, each idempotent, each held by one process at a time (I12).

A duty says what to do in `run_once`; the runner takes its lease, runs it in a worker thread and comes
back after a while. A process that dies leaves its lease to run out, and another goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from ..config import Limits
from ..errors import PenstockError
from ..store.contract import Group, Store, Topic

__all__ = ["DropLogs", "Duty", "DutyRunner", "ForgetProducers", "Retention"]

_log = logging.getLogger("penstock.broker")

_SLICES = 200  # at most so many slices of deletes per run, so that no run holds its lease for long


class Duty(Protocol):
    name: str
    every_s: float

    def run_once(self) -> None:
        """Do what is due now. May be cut at any point and run again by anybody."""


class Retention:
    """Drop what is older or larger than the topic allows and no group needs (R44)."""

    name: str = "retention"
    every_s: float = 10

    def __init__(self, store: Store, limits: Limits) -> None:
        self._store = store
        self._limits = limits

    def run_once(self) -> None:
        for topic in self._store.catalog.topics():
            groups = self._store.catalog.groups(topic.name)
            for piece in topic.route.ranges:
                self._trim(topic, piece.partition_id, groups)
                sweep(self._store, piece.partition_id, self._limits)

    def _trim(self, topic: Topic, partition_id: int, groups: Sequence[Group]) -> None:
        settings = topic.settings
        before = self._store.now_ms() - settings.retention_ms if settings.retention_ms else 0
        limit = self._store.log.expire_by_limits(
            partition_id, before_ms=before, keep_bytes=settings.retention_bytes
        )
        needed = min((self._needed(group, partition_id) for group in groups), default=limit)
        start = limit if settings.keep == "limits" else min(limit, needed)
        if settings.drop_settled and groups:
            start = max(start, needed)
        if start > self._store.log.bounds([partition_id])[partition_id].start:
            self._store.log.trim(partition_id, start)

    def _needed(self, group: Group, partition_id: int) -> int:
        committed = self._store.progress.committed(group.id, partition_id)
        return self._store.catalog.start_of(group.id, partition_id)[1] if committed is None else committed


class DropLogs:
    """Remove the logs of deleted topics: in slices first, since a big DROP holds the lock for long (I19)."""

    name: str = "drop-logs"
    every_s: float = 10

    def __init__(self, store: Store, limits: Limits) -> None:
        self._store = store
        self._limits = limits

    def run_once(self) -> None:
        for partition_id in self._store.catalog.dropped():
            self._store.log.trim(partition_id, 2**62)
            if sweep(self._store, partition_id, self._limits):
                self._store.catalog.drop_log(partition_id)


class ForgetProducers:
    """Forget the sequences of producers that have been silent for long."""

    name: str = "forget-producers"
    every_s: float = 3600

    def __init__(self, store: Store, limits: Limits) -> None:
        self._store = store
        self._limits = limits

    def run_once(self) -> None:
        self._store.log.forget_producers(self._store.now_ms() - self._limits.producer_memory_ms)


def sweep(store: Store, partition_id: int, limits: Limits) -> bool:
    """Delete what lies below the start, in slices; False if some is left for the next run."""
    for _ in range(_SLICES):
        if store.log.sweep(partition_id, rows=limits.retention_slice_rows) == 0:
            return True
    return False


class DutyRunner:
    def __init__(
        self,
        store: Store,
        duties: Sequence[Duty],
        holder: str,
        limits: Limits,
        in_thread: Callable[..., Awaitable[object]],
    ) -> None:
        self._store = store
        self._duties = duties
        self._holder = holder
        self._limits = limits
        self._in_thread = in_thread
        self._held: set[str] = set()
        self._stopping = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        due = {duty.name: loop.time() + duty.every_s for duty in self._duties}
        while not await self._stopped_within(max(0.0, min(due.values()) - loop.time())):
            for duty in self._duties:
                if due[duty.name] <= loop.time() and not self._stopping.is_set():
                    await self._in_thread(self.run_once, duty)
                    due[duty.name] = loop.time() + duty.every_s

    async def _stopped_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            pass
        return self._stopping.is_set()

    def run_once(self, duty: Duty) -> bool:
        """Run a duty if its lease can be had; True if it ran."""
        try:
            if not self._store.duties.acquire(duty.name, self._holder, self._limits.duty_lease_ms):
                return False
            self._held.add(duty.name)
            duty.run_once()
        except PenstockError as error:
            _log.warning("duty %s waits: %s", duty.name, error)
            return False
        except Exception:
            _log.exception("duty %s failed in an unexpected way; the others go on", duty.name)
            return False
        return True

    async def close(self) -> None:
        """Let a duty that runs now finish (its thread cannot be cancelled), then give the leases back."""
        self._stopping.set()
        await asyncio.wait((self._task,))  # cancelled already, if the loop is being closed
        await self._in_thread(self._release)

    def _release(self) -> None:
        for name in tuple(self._held):
            try:
                self._store.duties.release(name, self._holder)
            except PenstockError as error:
                _log.warning("lease of duty %s is left to run out: %s", name, error)
