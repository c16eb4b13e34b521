"""Heartbeats: one thread for a connection that keeps members live and leases held.

A thread of its own, so that a handler which blocks the event loop does not lose its leases. It reads what
consumers hold (`Deliveries.held`), asks the endpoint to keep it, and moves `until` of what was kept. Must
never touch asyncio objects: what is lost is handed to the loop with `call_soon_threadsafe`. A failing beat is
logged once and tried again; nothing else stops for it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable

from ...clock import CautiousTime, Clock, is_real
from ...endpoint.endpoint import Endpoint
from ...endpoint.requests import Answer, Ask
from ...endpoint.values import Held
from ...model.delivery.delivery import Span
from ..owner_check import Guard
from .in_flight import Deliveries, Leased, Membership

__all__ = ["Heart", "Heartbeat"]

log = logging.getLogger("postroom.heartbeat")

_BEATS_PER_LEASE = 3


class Heart:
    """One consumer, as the heartbeat sees it."""

    def __init__(
        self, who: Membership, in_flight: Deliveries, on_beat: Callable[[], None] | None = None
    ) -> None:
        self.who, self.in_flight = who, in_flight
        self.next_at = 0.0  # by the monotonic clock
        self.failing = False
        self.on_beat = on_beat  # to be told in the loop of every beat
        self.beating = threading.Lock()  # held during a beat
        self.stopped = False

    def wait_until_quiet(self) -> None:
        """Blocks until a beat under way has ended: after its member left, it would bring it back."""
        with self.beating:
            pass


class Heartbeat:
    def __init__(self, endpoint: Endpoint, guard: Guard, clock: Clock) -> None:
        self._endpoint, self._guard, self._clock = endpoint, guard, clock
        # by which handling hangs: not because the clock of the store was set (I26)
        self.handling_ms = CautiousTime(endpoint.reached_ms).now_ms if is_real(clock) else endpoint.reached_ms
        self._hearts: list[Heart] = []
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._moved = False
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._unsubscribe = clock.subscribe(self._clock_moved)

    def add(self, heart: Heart) -> None:
        self.handling_ms()  # from here on a step is seen
        heart.next_at = time.monotonic() + heart.who.lease_ms / 1000 / _BEATS_PER_LEASE
        with self._lock:
            self._hearts.append(heart)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="postroom-heartbeat", daemon=True)
            self._thread.start()
        self._wake.set()

    def remove(self, heart: Heart) -> None:
        """No beat begins after this; one may still be under way."""
        heart.stopped = True
        with self._lock, contextlib.suppress(ValueError):
            self._hearts.remove(heart)

    def stop(self) -> None:
        """Blocks until a beat under way has ended; call it from another thread than the loop's."""
        self._stopped = True
        self._unsubscribe()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    def answer(self, ask: Ask) -> Answer:
        """To a broker that asks before it delivers again (R19): what is at work here, and what is done."""
        keys = {(held.topic, held.partition_id, held.token) for held in ask.held}
        who, now_ms = (ask.topic, ask.group, ask.member), self.handling_ms()
        with self._lock:
            hearts = [h for h in self._hearts if (h.who.topic, h.who.group, h.who.member) == who]
        held = [one for h in hearts for one in h.in_flight.held(now_ms, h.who.max_handling_ms)]
        done = [one for h in hearts for one in h.in_flight.acking()]
        return Answer(
            tuple(one for one in held if (one.topic, one.partition_id, one.token) in keys),
            tuple(one for one in done if (one.topic, one.partition_id, one.token) in keys),
        )

    def _clock_moved(self) -> None:
        self._moved = True
        self._wake.set()

    def _run(self) -> None:
        while not self._stopped:
            self._wake.wait(self._idle_seconds())
            self._wake.clear()
            moved, self._moved = self._moved, False
            if not self._stopped:
                self.beat_once(everybody=moved)

    def _idle_seconds(self) -> float | None:
        with self._lock:
            due = min((heart.next_at for heart in self._hearts), default=None)
        return None if due is None else max(0.0, due - time.monotonic())

    def beat_once(self, *, everybody: bool = True) -> None:
        with self._lock:
            hearts = list(self._hearts)
        for heart in hearts:
            if everybody or heart.next_at <= time.monotonic():
                self.beat_for(heart)

    def beat_for(self, heart: Heart) -> None:
        with heart.beating:
            if not heart.stopped:
                self._beat(heart)

    def _beat(self, heart: Heart) -> None:
        heart.next_at = time.monotonic() + heart.who.lease_ms / 1000 / _BEATS_PER_LEASE
        sent_ms = self._endpoint.reached_ms()
        held = heart.in_flight.held(self.handling_ms(), heart.who.max_handling_ms)
        try:
            told = self._endpoint.beat([heart.who.beat(held)])
        except Exception as error:
            if not heart.failing and not self._stopped:
                log.warning("a heartbeat of %s failed, trying again: %r", heart.who.member, error)
            heart.failing = True
            return
        heart.failing = False
        # What was settled here meanwhile is not held any more either.
        # And what is on a shard that is away (no spans) is as it was: neither renewed nor lost.
        away = {found for found, spans in told if not spans}
        lost = [
            (found, spans)
            for found, spans in told
            if found not in away and any(one.loses(spans) for one in held[found])
        ]
        gone = away | {found for found, _ in lost}
        _prolong(
            (one for key, kept in held.items() if key not in gone for one in kept),
            sent_ms + heart.who.lease_ms,
        )
        self._tell(heart, lost)

    def _tell(self, heart: Heart, lost: list[tuple[Held, tuple[Span, ...]]]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody wants to know any more
            if lost:
                self._guard.loop.call_soon_threadsafe(_lose, heart.in_flight, lost)
            if heart.on_beat is not None:
                self._guard.loop.call_soon_threadsafe(heart.on_beat)


def _prolong(kept: Iterable[Leased], until: int) -> None:
    for one in kept:
        one.until = until


def _lose(in_flight: Deliveries, lost: list[tuple[Held, tuple[Span, ...]]]) -> None:
    for held, spans in lost:
        if in_flight.lose((held.topic, held.partition_id, held.token), spans):
            log.warning("lost the lease on %d ranges of topic %r", len(spans), held.topic)
