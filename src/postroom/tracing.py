"""Tracing with OpenTelemetry (extra `otel`): what programs call themselves.

Sending and the handlers of an `App` are traced by themselves once the program has set up a tracer provider.
"""

from __future__ import annotations

from .client.tracing import handling

__all__ = ["handling"]
