"""What tracing does where there is nothing to trace, and what it does to headers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from opentelemetry import baggage, context, propagate, trace
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

import postroom
from postroom import App, Connection, Message
from postroom.client import spans
from postroom.client.codec import Packed
from postroom.testing.fixture import run_until_idle
from tests.recorded import recording

# What a program does with the queue, in every way that could be traced.
PROGRAM = """
import asyncio, sys
{before}
import postroom

async def main():
    async with postroom.connect("memory://") as mq:
        await mq.create_topic("orders")
        await mq.send("orders", b"1")
        await mq.send_many("orders", [postroom.Message(b"2"), postroom.Message(b"3", headers={{"a": "b"}})])
        async with mq.producer("orders") as producer:
            await producer.post(b"4")
        app, handled, done = postroom.App(mq), [], asyncio.Event()

        @app.subscribe("orders", group="billing")
        async def bill(order: bytes, message):
            with postroom.tracing.handling(message) as span:
                handled.append((order, dict(message.headers), span))
            done.set() if len(handled) == 4 else None

        async with app:
            await asyncio.wait_for(done.wait(), 20)
        assert sorted(handled) == [(b"1", {{}}, None), (b"2", {{}}, None), (b"3", {{"a": b"b"}}, None),
                                   (b"4", {{}}, None)], handled

asyncio.run(main())
print(sorted(name for name in sys.modules if name.startswith("opentelemetry") and sys.modules[name]))
print("postroom.client.spans" in sys.modules)
"""

BLOCKED = """
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "opentelemetry":
            raise ImportError("blocked: " + name)

sys.meta_path.insert(0, Block())
"""


@pytest.mark.few(1, "starts programs")
@pytest.mark.parametrize(
    "before",
    ["", BLOCKED, "sys.modules['opentelemetry.trace'] = None"],
    ids=["not imported", "not installed", "blocked by the program"],
)
def test_nothing_is_imported_or_done_where_nobody_traces(before: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM.format(before=before)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["[]", "False"]


# ---- with OpenTelemetry, and nothing set up ----


@pytest.fixture
async def mq() -> AsyncIterator[Connection]:
    async with postroom.connect("memory://") as mq:
        await mq.create_topic("orders", partitions=1)
        yield mq


async def headers(mq: Connection) -> list[dict[str, bytes]]:
    return [dict(message.headers) async for message in mq.read("orders")]


async def test_without_a_provider_nothing_is_added(mq: Connection) -> None:
    await mq.send("orders", b"1", headers={"a": "b"})
    await mq.send_many("orders", [Message(b"2"), Message(b"3")])
    async with mq.producer("orders") as producer:
        await producer.post(b"4")
    assert await headers(mq) == [{"a": b"b"}, {}, {}, {}]


async def test_without_a_provider_what_comes_in_goes_on(mq: Connection) -> None:
    """Baggage, and the context of a caller, go through a handler to what it sends."""
    seen: list[Any] = []
    app = App(mq)

    @app.subscribe("orders", group="billing")
    async def bill(order: bytes) -> None:
        seen.append(baggage.get_baggage("customer"))
        if order == b"1":
            await mq.send("orders", b"2")

    token = context.attach(baggage.set_baggage("customer", "7"))
    try:
        await mq.send("orders", b"1")
    finally:
        context.detach(token)
    assert (await run_until_idle(app)).errors == []
    assert seen == ["7", "7"]
    assert await headers(mq) == [{"baggage": b"customer=7"}] * 2


async def test_what_is_not_sampled_is_told_on_and_not_recorded(mq: Connection) -> None:
    with recording(sampler=ALWAYS_OFF) as recorded:
        await mq.send("orders", b"1")
        assert recorded.names() == []
    (found,) = await headers(mq)
    assert found["traceparent"].endswith((b"-00", b"-02"))


# ---- headers ----


async def test_a_propagator_of_the_users_own_is_used(mq: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    class Own:
        fields = frozenset({"b3"})

        def inject(self, carrier: dict[str, str], context: Any = None, setter: Any = None) -> None:
            carrier["b3"] = f"{trace.get_current_span(context).get_span_context().trace_id:032x}"

        def extract(self, carrier: Any, context: Any = None, getter: Any = None) -> Any:
            return baggage.set_baggage("b3", getter.get(carrier, "b3"), context)

    monkeypatch.setattr(propagate, "get_global_textmap", Own)
    monkeypatch.setattr(propagate, "extract", Own().extract)
    app, seen = App(mq), []

    @app.subscribe("orders", group="billing")
    async def bill(order: bytes) -> None:
        seen.append(baggage.get_baggage("b3"))

    with recording() as recorded:
        await mq.send("orders", b"1")
        assert (await run_until_idle(app)).errors == []
        trace_id = f"{recorded.one('send orders').context.trace_id:032x}"
    assert await headers(mq) == [{"b3": trace_id.encode()}]
    assert seen == [[trace_id]]


async def test_a_propagator_that_fails_does_not_fail_a_send(
    mq: Connection, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        fields = frozenset({"traceparent"})

        def inject(self, *args: Any, **kwargs: Any) -> None:
            raise RuntimeError("broken")

        extract = inject

    app, handled = App(mq), []

    @app.subscribe("orders", group="billing")
    async def bill(order: bytes) -> None:
        handled.append(order)

    monkeypatch.setattr(propagate, "get_global_textmap", Broken)
    monkeypatch.setattr(propagate, "extract", Broken().extract)
    with recording() as recorded:
        await mq.send("orders", b"1", headers={"a": "b"})
        async with mq.producer("orders") as producer:
            await (await producer.post(b"2"))
        assert (await run_until_idle(app)).errors == []
    assert sorted(handled) == [b"1", b"2"]
    assert len(recorded.all("send orders")) == len(recorded.all("handle orders")) == 2
    assert "tracing failed" in caplog.text


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ([("a", b"1")], ["a", "traceparent", "tracestate", "baggage"]),
        ([("traceparent", b"x")], ["traceparent", "baggage"]),
        ([("tracestate", b"x")], ["tracestate", "traceparent", "baggage"]),
        ([("baggage", b"x"), ("a", b"1")], ["baggage", "a", "traceparent", "tracestate"]),
    ],
)
def test_what_the_user_gave_stays(own: list[tuple[str, bytes]], expected: list[str]) -> None:
    ours: Any = [("traceparent", b"t"), ("tracestate", b"s"), ("baggage", b"b")]
    packed = Packed([(None, b"v", list(own)), (b"k", b"w", [])], 10)
    spans._stamp(packed, ours)
    (_, _, first), (_, _, second) = packed.entries
    assert [name for name, _ in first] == expected
    assert first[: len(own)] == own  # neither changed nor moved
    assert second == ours
    assert packed.size == 10 + 2 * len("traceparentttracestatesbaggageb")


def test_headers_of_a_context_are_made_once() -> None:
    first = context.set_value("a", 1)
    assert spans._headers_of(first) is spans._headers_of(first)
    other = baggage.set_baggage("customer", "7")
    assert spans._headers_of(other) == [("baggage", b"customer=7")]
    assert spans._headers_of(first) == []
