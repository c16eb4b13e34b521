"""How far a stream is behind, from what Spark says of its progress.

Spark has no place where a source in Python could put metrics: `sources[n].metrics` stays empty. But progress
carries the newest offsets and those that were read, and the lag is what lies between. It is that of the
moment when the micro-batch was planned. Asks neither Spark nor the queue for anything more.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ..errors import InvalidSetting, PostroomError, UsageError
from .planning import Offsets

__all__ = ["Lag", "TopicLag", "lag", "lag_listener"]

log = logging.getLogger("postroom.spark")

_GAUGES = {
    "postroom_stream_lag_offsets": "offsets that a stream had not read when its last micro-batch was planned",
    "postroom_stream_newest_offset": "where the next message of a topic goes: of all partitions, added up",
    "postroom_stream_read_offset": "how far a stream has read, in the same way",
}
_LABELS = ("query", "topic")


@dataclass(frozen=True, slots=True)
class TopicLag:
    """Of one topic. Offsets are those of the next message, by the number of the partition."""

    newest: Mapping[int, int]
    read: Mapping[int, int]

    @property
    def behind(self) -> int:
        return sum(max(0, end - self.read.get(number, 0)) for number, end in self.newest.items())


@dataclass(frozen=True, slots=True)
class Lag:
    query: str  # its name, or else its id
    topics: Mapping[str, TopicLag] = field(default_factory=dict)

    @property
    def behind(self) -> int:
        return sum(topic.behind for topic in self.topics.values())


def lag(of: Any) -> Lag | None:
    """How far a streaming query is behind; None before its first micro-batch.

    `of` is the query, or a progress of it (`query.lastProgress`, `event.progress`). Sources that are not
    Postroom's are left out; InvalidSetting if there is no other.
    """
    progress = getattr(of, "lastProgress", of)
    if progress is None:
        return None
    known = _plain(progress)
    if known is None:
        raise InvalidSetting(f"lag() takes a streaming query, or a progress of one, and this is {of!r}")
    found = [pair for source in known["sources"] if (pair := _offsets(source)) is not None]
    if not found:
        raise InvalidSetting(
            "no source of this query is a stream from Postroom: lag() is for readStream.format('postroom')"
        )
    return Lag(known.get("name") or str(known.get("id", "")), _topics(found))


def lag_listener(tell: Callable[[Lag], object] | None = None) -> Any:
    """A `StreamingQueryListener` that tells the lag of every query from Postroom after each micro-batch.

    Add it with `spark.streams.addListener`. Where `prometheus_client` is installed the lag is a metric of
    this process, too. Without `tell` it is logged, as INFO of `postroom.spark`.
    """
    try:
        from pyspark.sql.streaming.listener import StreamingQueryListener
    except ImportError:
        raise UsageError("there is no pyspark here") from None

    class LagListener(StreamingQueryListener):  # type: ignore[misc]
        def __init__(self) -> None:
            self._shown: dict[str, Lag] = {}

        def onQueryStarted(self, event: Any) -> None:
            """Nothing was read yet."""

        def onQueryProgress(self, event: Any) -> None:
            try:
                found = lag(event.progress)
            except PostroomError:  # another source's query
                return
            if found is not None:
                self._shown[str(event.progress.runId)] = found
                _show(found)
                (tell or _write)(found)

        def onQueryIdle(self, event: Any) -> None:
            """Nothing came: what was told is still so."""

        def onQueryTerminated(self, event: Any) -> None:
            shown = self._shown.pop(str(event.runId), None)
            if shown is not None:
                _forget(shown)

    return LagListener()


# ---- progress ----


def _plain(progress: Any) -> dict[str, Any] | None:
    """As it is in JSON, however this version of Spark hands it over."""
    text = getattr(progress, "json", None)
    try:
        found = json.loads(text) if isinstance(text, str) else json.loads(json.dumps(progress))
    except (TypeError, ValueError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("sources"), list) else None


def _offsets(source: Mapping[str, Any]) -> tuple[Offsets, Offsets] | None:
    """The newest, and those that were read."""
    read = _decoded(source.get("endOffset"))
    newest = _decoded(source.get("latestOffset"))
    return None if read is None else (newest or read, read)


def _decoded(text: Any) -> Offsets | None:
    with suppress(ValueError, PostroomError):
        return Offsets.decode(json.loads(text) if isinstance(text, str) else text, lambda topic: True, "")
    return None


def _topics(found: Iterable[tuple[Offsets, Offsets]]) -> dict[str, TopicLag]:
    newest: dict[str, dict[int, int]] = {}
    read: dict[str, dict[int, int]] = {}
    for ends, at in found:
        for (topic, number), end in ends.at.items():
            newest.setdefault(topic, {})[number] = end
        for (topic, number), offset in at.at.items():
            mine = read.setdefault(topic, {})
            mine[number] = min(offset, mine.get(number, offset))  # read twice in a query: the slower one
    return {topic: TopicLag(newest[topic], read.get(topic, {})) for topic in sorted(newest)}


# ---- who is told ----


def _write(found: Lag) -> None:
    listed = ", ".join(f"{name} {topic.behind:,}" for name, topic in found.topics.items())
    log.info("stream %s is %s offsets behind: %s", found.query, f"{found.behind:,}", listed)


_made: list[Any] | None = None


def _gauges() -> list[Any]:
    global _made
    if _made is None:
        try:
            from prometheus_client import Gauge

            _made = [Gauge(name, text, _LABELS) for name, text in _GAUGES.items()]
        except (ImportError, ValueError) as error:  # it is not there; or somebody has these names already
            log.debug("streams have no figures for Prometheus: %r", error)
            _made = []
    return _made


def _show(found: Lag) -> None:
    for name, topic in found.topics.items():
        values = (topic.behind, sum(topic.newest.values()), sum(topic.read.values()))
        for gauge, value in zip(_gauges(), values, strict=False):
            gauge.labels(found.query, name).set(value)


def _forget(shown: Lag) -> None:
    for gauge in _gauges():
        for topic in shown.topics:
            with suppress(KeyError):
                gauge.remove(shown.query, topic)
