"""Channel: AMQP's methods, as kombu and Celery call them, on topics and groups.

Publishing returns when Postroom has stored the message. Acks are put on their way and repeated until they are
known (I25). A message that is rejected for good is a dead letter of the group `celery`; one that is requeued
is tried again at once, and has used up an attempt. Priorities are not kept: a warning says so once.

Decides nothing about messages in flight: the intake does. Must never lose a message that a declared queue
should have: a topic that somebody deleted is made again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from amqp.protocol import queue_declare_ok_t
from kombu.transport import virtual
from kombu.utils.uuid import uuid

from ...client.app.handler import ACK, RELEASE, Outcome
from ...errors import UnknownTopic
from . import letters, naming, queues
from .failures import no_queue, translated
from .intake import Intake
from .queues import Binding, Queue

if TYPE_CHECKING:
    from .transport import Transport

__all__ = ["Channel"]

log = logging.getLogger("postroom.celery")

_REJECTED = Outcome("dead", reason="a Celery worker rejected it")
_REQUEUED = Outcome("retry", reason="a Celery worker requeued it")  # an attempt: it comes as redelivered


class Channel(virtual.Channel):  # type: ignore[misc]
    supports_fanout = True
    connection: Transport

    def __init__(self, connection: Transport, **how: Any) -> None:
        super().__init__(connection, **how)
        self._intake: Intake | None = None
        self._prefetch = 0
        self.closed: bool
        self.callbacks: dict[str, Callable[[Any], None]] = {}  # by consumer tag
        self.without_acks: set[str] = set()

    def _run(self, function: Callable[..., Any], *args: Any, **how: Any) -> Any:
        with translated():
            return self.connection.link.run(function, *args, **how)

    # ---- queues ----

    def queue_declare(self, queue: str | None = None, passive: bool = False, **how: Any) -> Any:
        name = queue or f"amq.gen-{uuid()}"
        if passive:
            return self._passive(name)
        declared = self.connection.queues.get(name)
        if declared is None:
            temporary = bool(how.get("auto_delete") or how.get("exclusive"))
            declared = Queue(name, temporary, queues.idle_of(how.get("arguments")), own=not temporary)
            self.connection.queues[name] = declared
        if declared.temporary:
            self.connection.make_pending()
            if not declared.bindings and not declared.own:
                self.connection.pending = declared  # it may get its messages by an exchange alone
            return queue_declare_ok_t(name, 0, 0)
        mq, options = self.connection.link.mq, self.connection.options
        self._run(queues.declare, mq, declared, options)
        return queue_declare_ok_t(name, self._run(queues.length, mq, declared), 0)

    def _passive(self, name: str) -> Any:
        self.connection.make_pending()
        queue = self.connection.queues.get(name) or Queue(name)
        try:
            return queue_declare_ok_t(name, self._run(queues.length, self.connection.link.mq, queue), 0)
        except UnknownTopic:
            raise no_queue(name) from None

    def queue_bind(
        self, queue: str, exchange: str | None = None, routing_key: str = "",
        arguments: Mapping[str, Any] | None = None, **how: Any,
    ) -> None:  # fmt: skip
        exchange = exchange or "amq.direct"
        if exchange not in self.state.exchanges:
            self.exchange_declare(exchange)
        found = self.connection.queues.setdefault(queue, Queue(queue))
        binding = Binding(exchange, self.typeof(exchange).type, routing_key or "")
        if binding in found.bindings:
            return
        if self.connection.pending is found:
            self.connection.pending = None
        self._run(queues.bind, self.connection.link.mq, found, binding, self.connection.options)
        found.bindings.add(binding)
        if not self.state.has_binding(queue, exchange, routing_key):
            self.state.binding_declare(queue, exchange, routing_key, arguments)
            self.get_table(exchange).append((routing_key, None, queue))

    def queue_unbind(
        self, queue: str, exchange: str | None = None, routing_key: str = "",
        arguments: Mapping[str, Any] | None = None, **how: Any,
    ) -> None:  # fmt: skip
        exchange = exchange or "amq.direct"
        found = self.connection.queues.get(queue)
        if found is not None:
            binding = Binding(exchange, self.typeof(exchange).type, routing_key or "")
            found.bindings.discard(binding)
            if binding.topic not in {source.topic for source in found.sources()}:
                gone = Queue(queue, found.temporary, bindings={binding}, own=False)
                self._run(queues.delete, self.connection.link.mq, gone)
        self.state.binding_delete(queue, exchange, routing_key)
        if exchange in self.state.exchanges:
            self.get_table(exchange)[:] = [
                one for one in self.get_table(exchange) if one[::2] != (routing_key, queue)
            ]

    def queue_delete(self, queue: str, if_unused: bool = False, if_empty: bool = False, **how: Any) -> None:
        found = self.connection.queues.get(queue) or Queue(queue)
        if if_empty and self._size(queue):
            return
        if self.connection.pending is found:
            self.connection.pending = None
        self._run(queues.delete, self.connection.link.mq, found)
        self.connection.queues.pop(queue, None)
        for exchange, key, _ in list(self.state.queue_bindings(queue)):
            self.get_table(exchange)[:] = [
                one for one in self.get_table(exchange) if one[::2] != (key, queue)
            ]
        self.state.queue_bindings_delete(queue)

    def queue_purge(self, queue: str, **how: Any) -> int:
        self.connection.make_pending()
        found = self.connection.queues.get(queue) or Queue(queue)
        count = self._size(queue)
        try:
            self._run(self.connection.link.mq.purge, found.topic)
        except UnknownTopic:
            raise no_queue(queue) from None
        return count

    def _size(self, queue: str) -> int:
        found = self.connection.queues.get(queue) or Queue(queue)
        try:
            return int(self._run(queues.length, self.connection.link.mq, found))
        except UnknownTopic:
            return 0

    def _has_queue(self, queue: str, **how: Any) -> bool:
        try:
            self._run(self.connection.link.mq.topic, naming.queue_topic(queue))
        except UnknownTopic:
            return False
        return True

    # ---- publishing ----

    def basic_publish(self, message: dict[str, Any], exchange: str, routing_key: str, **how: Any) -> None:
        self.connection.make_pending()
        message["properties"].setdefault("delivery_info", {}).update(
            exchange=exchange or "", routing_key=routing_key
        )
        if message["properties"].get("priority"):
            self.connection.warn_of_priorities()
        value, headers = letters.written(message)
        at, expires = letters.due(message), letters.lives(message)
        for topic in self._destinations(exchange, routing_key):
            try:
                mq = self.connection.link.mq
                self._run(mq.send, topic, value, headers=headers, at=at, expires=expires)
                return
            except UnknownTopic:
                continue
        if not exchange and routing_key in self.connection.queues:  # somebody deleted its topic
            self._run(queues.declare, self.connection.link.mq, self.connection.queues[routing_key],
                      self.connection.options)  # fmt: skip
            self._run(self.connection.link.mq.send, self.connection.queues[routing_key].topic, value,
                      headers=headers, at=at, expires=expires)  # fmt: skip
            return
        log.debug("no queue is bound to exchange %r by %r: a message is dropped", exchange, routing_key)

    def _destinations(self, exchange: str, key: str) -> list[str]:
        """The topics to try: where a message without an exchange goes depends on who declared the queue."""
        if exchange:
            return [Binding(exchange, self.typeof(exchange).type, key or "").topic]
        known = self.connection.queues.get(key)
        if known is not None:
            return [known.topic]
        return [naming.queue_topic(key), naming.queue_topic(key, temporary=True)]

    # ---- consuming ----

    @property
    def intake(self) -> Intake:
        """Made anew in a child process: the parent's is the parent's."""
        if self._intake is None:
            self._intake = self.connection.make_intake(self)
            self._intake.limit(self._prefetch)
        return self._intake

    def basic_consume(
        self, queue: str, no_ack: bool, callback: Callable[[Any], Any], consumer_tag: str, **how: Any
    ) -> None:
        self.connection.make_pending()
        found = self.connection.queues.get(queue) or Queue(queue)
        self.callbacks[consumer_tag] = lambda payload: callback(self.Message(payload, channel=self))
        self._consumers.add(consumer_tag)
        self._tag_to_queue[consumer_tag] = queue
        if no_ack:
            self.without_acks.add(consumer_tag)
        try:
            self._run(self.intake.add, consumer_tag, found.sources(), no_ack)
        except UnknownTopic:
            self._forget_consumer(consumer_tag)
            raise no_queue(queue) from None

    def basic_cancel(self, consumer_tag: str) -> None:
        if consumer_tag in self._consumers:
            self._forget_consumer(consumer_tag)
            self._run(self.intake.remove, consumer_tag)
            unread = self.connection.withdraw(self, consumer_tag)
            self.connection.link.soon(self.intake.settle, unread, RELEASE)

    def _forget_consumer(self, consumer_tag: str) -> None:
        self._consumers.discard(consumer_tag)
        self._tag_to_queue.pop(consumer_tag, None)
        self.callbacks.pop(consumer_tag, None)

    def basic_get(self, queue: str, no_ack: bool = False, **how: Any) -> Any:
        self.connection.make_pending()
        found = self.connection.queues.get(queue) or Queue(queue)
        for source in found.sources():
            try:
                arrival = self._run(self.intake.get, source, no_ack)
            except UnknownTopic:
                raise no_queue(queue) from None
            if arrival is not None:
                return self.Message(arrival.payload, channel=self)
        return None

    def basic_qos(self, prefetch_size: int = 0, prefetch_count: int = 0, apply_global: bool = False) -> None:
        self._prefetch = prefetch_count or 0
        if self._intake is not None:
            self.connection.link.soon(self._intake.limit, self._prefetch)

    # ---- settling: from any thread ----

    def basic_ack(self, delivery_tag: int, multiple: bool = False) -> None:
        self._settle(delivery_tag, ACK, multiple)

    def basic_reject(self, delivery_tag: int, requeue: bool = False) -> None:
        self._settle(delivery_tag, _REQUEUED if requeue else _REJECTED)

    def basic_recover(self, requeue: bool = False) -> None:
        if self._intake is not None:
            self.connection.link.soon(self._intake.release_all)

    def _settle(self, tag: int, outcome: Outcome, multiple: bool = False) -> None:
        intake = self._intake
        if intake is None or self.connection is None:
            return  # closed: it was released
        if multiple:
            self.connection.link.soon(intake.settle_up_to, tag, outcome)
        else:
            self.connection.link.soon(intake.settle, (tag,), outcome)

    # ---- life ----

    def forget(self) -> None:
        """In a child process: nothing of this belongs to it."""
        self._intake = None
        self._consumers.clear()
        self._tag_to_queue.clear()
        self.callbacks.clear()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._consumers.clear()
        self.callbacks.clear()
        intake, self._intake = self._intake, None
        if self.connection is not None:
            try:
                if intake is not None and self.connection.has_link:
                    self._run(intake.close)
            finally:
                self.connection.withdraw(self, None)
                self.connection.close_channel(self)
        self.exchange_types = None
