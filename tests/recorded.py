"""What was traced: a tracer provider for one test, whose spans stay in memory.

OpenTelemetry allows one provider per process, set once. Tests put theirs in its place and take it back, so
that the tests after them are not traced.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from postroom.client import spans

__all__ = ["Recorded", "id_of", "parent_of", "recording"]


class Recorded:
    def __init__(self, provider: TracerProvider, exporter: InMemorySpanExporter) -> None:
        self._exporter = exporter
        self._tracer = provider.get_tracer("the program's own")

    def span(self, name: str) -> Any:
        """A span of the program's own, current in its block."""
        return self._tracer.start_as_current_span(name)

    def all(self, name: str) -> list[ReadableSpan]:
        """Spans of that name that have ended, the first first."""
        found = [span for span in self._exporter.get_finished_spans() if span.name == name]
        return sorted(found, key=lambda span: span.start_time or 0)

    def one(self, name: str) -> ReadableSpan:
        (found,) = self.all(name)
        return found

    def names(self) -> list[str]:
        return sorted(span.name for span in self._exporter.get_finished_spans())


def id_of(span: ReadableSpan) -> str:
    """As it stands in a `traceparent` header."""
    return f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-{span.context.trace_flags:02x}"


def parent_of(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


@contextmanager
def recording(**options: Any) -> Iterator[Recorded]:
    provider, exporter = TracerProvider(shutdown_on_exit=False, **options), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "_TRACER_PROVIDER", provider)
        patch.setattr(spans, "_tracer", provider.get_tracer("postroom"))
        yield Recorded(provider, exporter)
    provider.shutdown()
