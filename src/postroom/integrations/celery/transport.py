"""Transport: Postroom as a broker of kombu's, and so of Celery's.

Decides how what arrives in the connection's thread gets to Celery: into a line that `drain_events` reads,
with a socket that becomes readable, so that Celery's event loop sleeps until there is something. Must never
use a connection of the parent process after a fork.
"""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import threading
from collections import deque
from time import monotonic
from typing import Any

from kombu.transport import base, virtual

from ...config import DEFAULTS
from . import channel as channels
from . import link as links
from . import queues
from .failures import Unreachable, translated
from .intake import Arrival, Intake
from .link import Link

__all__ = ["Transport"]

log = logging.getLogger("postroom.celery")

_PASSWORD = re.compile(r"(?<=:)[^:/@]+(?=@)")


class Transport(virtual.Transport):  # type: ignore[misc]
    Channel = channels.Channel
    can_parse_url = True
    default_port = None
    driver_type = "postroom"
    driver_name = "postroom"
    connection_errors = (*base.Transport.connection_errors, Unreachable, OSError)
    channel_errors = base.Transport.channel_errors
    implements = base.Transport.implements.extend(
        asynchronous=True, exchange_type=frozenset(["direct", "topic", "fanout"]), heartbeats=False
    )

    def __init__(self, client: Any, **how: Any) -> None:
        super().__init__(client, **how)
        self.options = queues.Options.of(client.transport_options or {})
        self.queues: dict[str, queues.Queue] = {}  # those that were declared here
        self.pending: queues.Queue | None = None  # a temporary one whose topic may not be needed
        self._link: Link | None = None
        self._arrivals: deque[tuple[channels.Channel, Arrival]] = deque()
        self._news = threading.Condition()
        self._failure: Exception | None = None
        self._bell: tuple[socket.socket, socket.socket] | None = None
        self._rung = False
        self._swept = self._warned = False

    def driver_version(self) -> str:
        from ... import __version__

        return __version__

    def as_uri(self, uri: str, include_password: bool = False, mask: str = "**") -> str:
        shown = uri if include_password else _PASSWORD.sub(mask, uri)
        return shown if shown.startswith("postroom:") else f"postroom+{shown}"

    # ---- connection ----

    @property
    def link(self) -> Link:
        if self._link is None or not self._link.usable:
            self.establish_connection()
        assert self._link is not None
        return self._link

    @property
    def has_link(self) -> bool:
        return self._link is not None and self._link.usable

    def establish_connection(self) -> Transport:
        if not self.has_link:
            self._forget()
            with translated():
                self._link = links.take(self._url(), self.client.transport_options or {})
        return self

    def _url(self) -> str:
        return str(self.client.hostname)

    def _forget(self) -> None:
        """Of a process before the fork, or of a connection that has ended."""
        for channel in self.channels:
            channel.forget()
        self._link, self._failure, self.pending = None, None, None
        self._news = threading.Condition()
        self._arrivals.clear()
        self.queues.clear()
        self._drop_bell()

    def verify_connection(self, connection: Any) -> bool:
        return self.has_link and self._failure is None

    def create_channel(self, connection: Any) -> channels.Channel:
        channel = channels.Channel(self)
        self.channels.append(channel)
        return channel

    def close_connection(self, connection: Any) -> None:
        if not self.has_link:
            self._forget()
            self.channels.clear()
            return
        for channel in list(self.channels):
            with contextlib.suppress(*self.connection_errors, *self.channel_errors):
                channel.close()
        link, self._link = self._link, None
        self._drop_bell()
        if link is not None:
            links.give_back(link)

    _collect = close_connection

    # ---- queues ----

    def make_pending(self) -> None:
        """A temporary queue that was bound to nothing gets its messages by its name: it has a topic."""
        queue, self.pending = self.pending, None
        if queue is not None:
            queue.own = True
            with translated():
                self.link.run(queues.declare, self.link.mq, queue, self.options)
                if not self._swept:
                    self._swept = True
                    old_ms = DEFAULTS.tuning.client.reply_queue_ms
                    self.link.run(queues.sweep, self.link.mq, self.link.mq._endpoint.now_ms(), old_ms)

    def warn_of_priorities(self) -> None:
        if not self._warned:
            self._warned = True
            log.warning("priorities are not kept: use a queue for each, and workers that read it (celery -Q)")

    # ---- arrivals: put in by the connection's thread ----

    def make_intake(self, channel: channels.Channel) -> Intake:
        async def make() -> Intake:
            return Intake(self.link.mq, lambda arrival: self._put((channel, arrival)), self._fail)

        return self.link.run(make)

    def _put(self, arrival: tuple[channels.Channel, Arrival]) -> None:
        with self._news:
            self._arrivals.append(arrival)
            self._ring()

    def _fail(self, error: Exception) -> None:
        with self._news:
            self._failure = error
            self._ring()

    def _ring(self) -> None:
        self._news.notify()
        if self._bell is not None and not self._rung:
            self._rung = True
            self._bell[1].send(b"\0")

    def withdraw(self, channel: channels.Channel, consumer_tag: str | None) -> list[int]:
        """Take back what a consumer, or all of a channel, was not given yet; returns the deliveries' tags."""
        with self._news:
            taken = [
                (one, arrival)
                for one, arrival in self._arrivals
                if one is channel and consumer_tag in (None, arrival.consumer_tag)
            ]
            for pair in taken:
                self._arrivals.remove(pair)
        return [arrival.tag for _, arrival in taken]

    def drain_events(self, connection: Any, timeout: float | None = None, **how: Any) -> None:
        """Give one message to its consumer; socket.timeout if none comes."""
        self.make_pending()
        until = None if timeout is None else monotonic() + timeout
        with self._news:
            while not self._arrivals:
                if self._failure is not None:
                    raise Unreachable(f"consuming has ended: {self._failure}") from self._failure
                left = None if until is None else until - monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError
                self._news.wait(left)
            channel, arrival = self._arrivals.popleft()
        if arrival.consumer_tag in channel.without_acks and channel._intake is not None:
            self.link.soon(channel._intake.read)
        callback = channel.callbacks.get(arrival.consumer_tag)
        if callback is not None:  # else it was cancelled just now, and the message is released
            callback(arrival.payload)

    # ---- Celery's event loop ----

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        with self._news:
            if self._bell is None:
                self._bell = socket.socketpair()
                for end in self._bell:
                    end.setblocking(False)
            self._rung = True
            self._bell[1].send(b"\0")  # for what came before
        loop.add_reader(self._bell[0].fileno(), self._on_bell, connection)

    def _on_bell(self, connection: Any) -> None:
        with self._news:
            if self._bell is None:
                return
            self._rung = False
            with contextlib.suppress(BlockingIOError):
                self._bell[0].recv(4096)
        with contextlib.suppress(TimeoutError):
            while True:
                self.drain_events(connection, timeout=0)

    def unregister_from_event_loop(self, connection: Any, loop: Any) -> None:
        if self._bell is not None:
            loop.remove_reader(self._bell[0].fileno())

    def _drop_bell(self) -> None:
        bell, self._bell, self._rung = self._bell, None, False
        for end in bell or ():
            end.close()
