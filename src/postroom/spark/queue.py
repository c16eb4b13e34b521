"""A queue as the data source uses it: blocking calls, from the driver or an executor.

Decides nothing. The event loop has a thread of its own, so that a broker does not take an executor for dead
that waits for Spark. A queue is opened where it is used, and never sent to another process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from socket import gethostname
from time import sleep
from types import TracebackType
from typing import Any, Self, TypeVar

from ..address import parse
from ..broker.endpoint import Fetched
from ..client.app.portal import LoopThread
from ..client.connection import Connection, connect
from ..client.producing.appending import pause
from ..errors import InvalidSetting, PostroomError, UnknownGroup, UnknownPartition
from ..model.route import Route
from ..model.settings import GroupWish, Start
from .options import Reach, Topics, bad_option
from .planning import Partition, Snapshot, Span

__all__ = ["Queue"]

T = TypeVar("T")

_TRIES = 20
_FETCH_MESSAGES = 50_000
_FETCH_BYTES = 4 * 1024 * 1024


class Queue:
    def __init__(self, reach: Reach) -> None:
        self._loop = LoopThread(lambda portal, value: value)
        self._ahead = ThreadPoolExecutor(1, "postroom-ahead")
        try:
            self._mq: Connection = self._loop.call(_open, reach)
        except BaseException:
            self._loop.end()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._ahead.shutdown(cancel_futures=True)
        try:
            self._loop.call(self._mq.close)
        finally:
            self._loop.end()

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Asked again while it may succeed; everything here can be."""
        for tries in range(1, _TRIES + 1):
            try:
                return self._loop.call(function, *args, **kwargs)
            except PostroomError as error:
                if not error.retriable or tries == _TRIES:
                    raise
                sleep(pause(tries))

    # ---- partitions ----

    def topics(self, wanted: Topics) -> list[str]:
        if not wanted.pattern:
            return list(wanted.names)
        return sorted(info.name for info in self._call(self._mq.topics) if wanted.takes(info.name))

    def routes(self, wanted: Topics) -> list[Route]:
        return [self._call(self._mq.route, topic) for topic in self.topics(wanted)]

    def resolve(self, topic: str, start: Start) -> dict[int, int]:
        """Offsets by partition id."""
        found: dict[int, int] = self._call(self._mq._endpoint.resolve, topic, start)
        return found

    def identity(self, topic: str) -> int:
        """The lowest id of its first partitions: no topic after it has the same."""
        history: list[Route] = self._call(self._mq.route_history, topic)
        return min(piece.partition_id for piece in history[0].ranges)

    def snapshot(self, wanted: Topics, identity: Callable[[str], int], *, starts: bool) -> Snapshot:
        """`starts`: also what is kept, which is a question more."""
        for tries in range(1, _TRIES + 1):
            try:
                return self._snapshot(wanted, identity, starts)
            except UnknownPartition:  # dropped by retention between two questions
                if tries == _TRIES:
                    raise
        raise AssertionError

    def _snapshot(self, wanted: Topics, identity: Callable[[str], int], starts: bool) -> Snapshot:
        found = {}
        routes = self.routes(wanted)
        for route in routes:  # the route first: the end of what it shows as sealed is final
            ends = self.resolve(route.topic, Start("latest"))
            kept = self.resolve(route.topic, Start("earliest")) if starts else {}
            numbers = {piece.partition_id: piece.partition for piece in route.partitions}
            sealed = {piece.partition_id for piece in route.sealed}
            for piece in route.partitions:
                id, place = piece.partition_id, (route.topic, piece.partition)
                if id not in ends or (wanted.partitions and place not in wanted.partitions):
                    continue
                before = tuple(numbers[one] for one in route.predecessors.get(id, ()) if one in numbers)
                found[place] = Partition(id, ends[id], kept.get(id, 0), id in sealed, before)
        return Snapshot(found, {route.topic: identity(route.topic) for route in routes})

    # ---- messages ----

    def fetch(self, span: Span, offset: int) -> Fetched:
        found: Fetched = self._call(
            self._mq._endpoint.fetch,
            span.topic,
            span.partition_id,
            offset,
            max_messages=min(_FETCH_MESSAGES, span.end - offset),
            max_bytes=_FETCH_BYTES,
            wait_ms=0,
        )
        return found

    def fetch_ahead(self, span: Span, offset: int) -> Future[Fetched]:
        return self._ahead.submit(self.fetch, span, offset)

    # ---- groups ----

    def set_group(self, topic: str, group: str, offsets: Iterable[tuple[int, int]]) -> None:
        """Where a group is, by partition number. GroupLive if somebody consumes in it."""
        known = dict(offsets)
        for tries in range(1, _TRIES + 1):
            try:
                return self._set_group(topic, group, known)
            except InvalidSetting:  # a partition was dropped by retention after the look at the route
                if tries == _TRIES:
                    raise

    def _set_group(self, topic: str, group: str, offsets: Mapping[int, int]) -> None:
        route: Route = self._call(self._mq.route, topic)
        there = {piece.partition for piece in route.partitions}
        wish = Start("offsets", offsets=tuple((n, at) for n, at in sorted(offsets.items()) if n in there))
        kept: dict[int, int] = self._call(self._mq._endpoint.resolve, topic, wish)  # not below what is kept
        ids = {piece.partition: piece.partition_id for piece in route.partitions}
        start = Start("offsets", offsets=tuple((n, kept.get(ids[n], at)) for n, at in wish.offsets))
        try:
            self._call(self._mq._endpoint.reset, topic, group, start, False)
        except UnknownGroup:
            self._call(self._mq._endpoint.create_group, topic, group, GroupWish(start=start))


async def _open(reach: Reach) -> Connection:
    path = parse(reach.url).path
    if path is not None and not path.exists():  # to connect would make it
        raise bad_option("url", f"there is no file {path} on this machine, {gethostname()}")
    tls = {"true": True, "false": None}.get((reach.tls or "false").lower(), reach.tls)
    return await connect(
        reach.url, token=reach.token, tls=tls, shards=dict(reach.shards) or None, client_id=None
    )
