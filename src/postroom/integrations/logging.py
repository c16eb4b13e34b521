"""A `logging.Handler` that sends log records to a topic: from there they go to a data lake, or anywhere.

    handler = PostroomHandler("logs", "postgresql://…", spool="/var/lib/shop/logs.spool")
    logging.getLogger().addHandler(handler)

Decides what a record is as a message, and what happens to records that cannot be sent: they wait in memory
up to `buffer_bytes`, or in the spool, and beyond that the newest are dropped and counted. Each record has a
number of its process, given before it can be dropped, so that an audit of the topic finds what is missing.
Must never make the program wait, never raise into it, and never log about itself into itself: what Postroom
logs, and what is logged in its threads, is left to other handlers.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import socket
import threading
import traceback
from collections import deque
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from .. import sync
from ..backoff import SLOW
from ..client.message import Message
from ..config import DEFAULTS
from ..errors import InvalidMessage, MessageTooLarge
from ..model.topology.names import check_topic
from ..units import Duration, duration_ms, size_bytes

__all__ = ["PostroomHandler"]

log = logging.getLogger("postroom.logs")

_LONGEST_TEXT = 64 * 1024  # of a message or a traceback; the rest is cut
_AT_ONCE = 1000  # records in one send
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_HANDLERS = "postroom.app"  # users' handlers that fail: the one logger of ours that is about the program


class PostroomHandler(logging.Handler):
    """Sends records to a topic, which has to be there, in a thread of its own.

    `spool` names a file that keeps records while the queue is unreachable, of this process alone. `options`
    are those of `postroom.connect`.
    """

    def __init__(
        self,
        topic: str,
        url: str | None = None,
        *,
        level: int | str = logging.NOTSET,
        spool: str | Path | None = None,
        buffer_bytes: int | str = "16 MB",
        **options: Any,
    ) -> None:
        super().__init__(level)
        self.topic = check_topic(topic)
        self.sent = 0  # records that are stored, in the queue or in the spool
        self.dropped = 0  # records that found no room, or could not be written
        self._url = url or os.environ.get("POSTROOM_URL") or "sqlite:///postroom.db"
        self._spool, self._options = spool, options
        self._room = size_bytes(buffer_bytes, name="buffer_bytes")
        self._tuning = DEFAULTS.tuning.client
        self._inside = threading.local()
        self._begin()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._begin)
        # `atexit`, and with it `logging.shutdown`, comes when no event loop can start a thread any more: a
        # short program would lose what it logged. concurrent.futures ends its own threads by the same hook.
        getattr(threading, "_register_atexit", atexit.register)(self.flush)

    def _begin(self) -> None:
        """Start with nothing: after a fork the parent has the thread, and sends what waits."""
        self.producer = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._number = 0
        self._records: deque[Message] = deque()
        self._bytes = 0
        self._news = threading.Condition()
        self._ending = False
        self._sender: threading.Thread | None = None

    # ---- in the program's threads ----

    def handle(self, record: logging.LogRecord) -> bool:
        """As any handler, but without its lock: `logging.shutdown` holds that while records are sent."""
        found: Any = self.filter(record)
        if found:
            self.emit(found if isinstance(found, logging.LogRecord) else record)
        return bool(found)

    def emit(self, record: logging.LogRecord) -> None:
        if self._is_own(record) or getattr(self._inside, "emitting", False):
            return
        self._inside.emitting = True  # what is logged while a record is written would come back here
        try:
            self._take(record)
        except Exception:
            self.dropped += 1
            self.handleError(record)
        finally:
            self._inside.emitting = False

    def _is_own(self, record: logging.LogRecord) -> bool:
        name = record.name
        if name == "postroom" or name.startswith("postroom."):
            return not (name == _HANDLERS or name.startswith(f"{_HANDLERS}."))
        return threading.current_thread().name.startswith("postroom-")  # those that send, and the client's

    def _take(self, record: logging.LogRecord) -> None:
        value = self.body(record)
        with self._news:
            number, self._number = self._number, self._number + 1
            if self._bytes + len(value) > self._room or self._ending:
                self.dropped += 1
                return
            self._records.append(self._message(record, value, number))
            self._bytes += len(value)
            if self._sender is None:
                self._sender = threading.Thread(target=self._run, name="postroom-logs", daemon=True)
                self._sender.start()
            self._news.notify_all()

    def _message(self, record: logging.LogRecord, value: bytes, number: int) -> Message:
        headers = {"producer": self.producer, "seq": str(number), "level": record.levelname}
        at_ms = round(record.created * 1000)
        id = f"{self.producer}-{number}"
        return Message(value, key=self.producer, headers=headers, id=id, timestamp=at_ms)

    def body(self, record: logging.LogRecord) -> bytes:
        """The value of the message, as JSON; formatters are for people. Override it to write otherwise."""
        found: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage()[:_LONGEST_TEXT],
            "process": record.process,
            "thread": record.threadName,
        }
        if record.exc_info and record.exc_info[0] is not None:
            found["traceback"] = "".join(traceback.format_exception(*record.exc_info))[-_LONGEST_TEXT:]
        more = {name: value for name, value in vars(record).items() if name not in _STANDARD}
        return _encoded({**found, **{name: more[name] for name in more if name not in found}})

    def flush(self) -> None:
        """Wait until all is sent, for 5 s at most."""
        self.flushed(self._tuning.logs_flush_s)

    def flushed(self, timeout: Duration) -> bool:
        """Wait until all is sent; False: the time was over before."""
        with self._news:
            return self._news.wait_for(lambda: not self._records, duration_ms(timeout, name="timeout") / 1000)

    def close(self) -> None:
        """Send what waits, for 5 s at most, and end. What is left is dropped; a spool keeps what it has."""
        self.flush()
        with self._news:
            self._ending = True
            self._news.notify_all()
            sender = self._sender
        if sender is not None:
            sender.join(self._tuning.logs_flush_s)
        super().close()

    # ---- in the thread that sends ----

    def _run(self) -> None:
        failures = 0
        while not self._over():
            try:
                with self._opened() as queue:
                    while self._await_records():
                        self._send(queue)
                        failures = 0
            except Exception as error:  # whatever it is, the program goes on, and so do records
                failures += 1
                if failures == 1 and self._records:
                    log.warning("log records wait: %s: %s", type(error).__name__, error)
                with self._news:
                    self._news.wait_for(lambda: self._ending, SLOW.after(failures))
                    if self._ending:
                        self._give_up()

    def _over(self) -> bool:
        with self._news:
            return self._ending and not self._records

    def _opened(self) -> sync.Spool | sync.Connection:
        if self._spool is not None:
            queue: sync.Spool | sync.Connection = sync.Spool(self._spool, self._url, **self._options)
        else:
            queue = sync.connect(self._url, **self._options)
        return queue

    def _await_records(self) -> bool:
        """Wait until there are some, and a moment more for others; False: it is over."""
        with self._news:
            self._news.wait_for(lambda: self._records or self._ending)
            if not self._ending and len(self._records) < _AT_ONCE:
                self._news.wait_for(
                    lambda: self._ending or len(self._records) >= _AT_ONCE, self._tuning.logs_linger_s
                )
            return bool(self._records)

    def _send(self, queue: sync.Spool | sync.Connection) -> None:
        with self._news:
            records = [self._records[n] for n in range(min(_AT_ONCE, len(self._records)))]
        try:
            queue.send_many(self.topic, records)
            stored = True
        except (InvalidMessage, MessageTooLarge) as error:  # these will never fit, those behind them may
            stored = False
            log.warning("%d log records dropped: %s", len(records), error)
        with self._news:
            for _ in records:
                self._bytes -= len(self._records.popleft().value)
            self.sent += len(records) if stored else 0
            self.dropped += 0 if stored else len(records)
            self._news.notify_all()

    def _give_up(self) -> None:
        self.dropped += len(self._records)
        self._records.clear()
        self._bytes = 0
        self._news.notify_all()


def _encoded(found: dict[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(found, enc_hook=str)
    except Exception:  # something in `extra` that no JSON has, or text that is no Unicode
        plain = {
            str(name): str(value).encode("utf-8", "backslashreplace").decode()
            for name, value in found.items()
        }
        return msgspec.json.encode(plain)
