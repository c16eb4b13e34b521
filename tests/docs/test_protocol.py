"""The pages about the protocol agree with the code: bytes, kinds, fields, limits."""

from __future__ import annotations

import re

from postroom.config import DEFAULTS
from postroom.endpoint import requests as r
from postroom.endpoint.operations import OPERATIONS
from postroom.model.messages.batch import SEAL
from postroom.units import format_bytes, format_duration
from postroom.wire import messages as m
from postroom.wire.frames import ERROR, REPLY, FrameParser, encode
from postroom.wire.server import session
from postroom.wire.server.listening import Listening
from tests.docs.pages import ROOT, blocks, table
from tests.docs.wire_tables import ARRAYS, every_operation, operation_rows, type_text, value_rows
from tests.request_types import walked

PAGE = ROOT / "docs" / "PROTOCOL.md"
TABLES = ROOT / "docs" / "protocol-operations.md"
LIMITS = ROOT / "docs" / "protocol-limits.md"
TEXT = PAGE.read_text(encoding="utf-8")


def shown_bytes() -> list[bytes]:
    dumps = [block.text for block in blocks(PAGE) if re.fullmatch(r"[0-9a-f\s]+", block.text)]
    return [bytes.fromhex(dump) for dump in dumps]


def test_the_bytes_shown_are_what_the_code_makes() -> None:
    failure = m.encode_header(m.Failure("unknown_topic", "no such.", False, {"topic": "orders"}))
    made = [
        encode(m.HELLO, 1, m.encode_header([1, 1, "shop-1"])),
        encode(OPERATIONS["append"].kind, 2, m.encode_header(["orders", 7]), [b"batch"]),
        encode(OPERATIONS["append"].kind, 2, failure, (), REPLY | ERROR),
    ]
    assert shown_bytes() == [b"".join(pieces) for pieces in made]


def test_the_bytes_shown_are_understood() -> None:
    hello, append, error = (frame for data in shown_bytes() for frame in FrameParser(1000).feed(data))
    assert m.decode(hello.header, m.Hello) == m.Hello(m.MIN_VERSION, m.MAX_VERSION, "shop-1")
    assert m.decode(append.header, r.Append) == r.Append("orders", 7)
    assert append.body == b"batch"
    assert m.decode(error.header, m.Failure).code == "unknown_topic"


def cells(heading: str) -> list[tuple[str, ...]]:
    return [tuple(cell.replace("`", "") for cell in row) for row in table(TABLES, heading)]


def test_the_operations_are_the_code() -> None:
    assert cells("Operations") == operation_rows()


def test_the_values_are_the_code() -> None:
    known = value_rows()
    arrays = {type_text(one) for one in ARRAYS}
    assert dict(cells("Arrays")) == {name: known[name] for name in arrays}
    assert dict(cells("Maps")) == {name: fields for name, fields in known.items() if name not in arrays}


def test_the_kinds_that_are_no_operations_are_named() -> None:
    for name, kind in (("Hello", m.HELLO), ("Cancel", m.CANCEL)):
        assert f"`{name}` (kind {kind}" in TEXT
    assert f"a frame of kind {m.ASK} that is no answer" in TEXT
    assert f"Send `brokers` (kind {m.BROKERS})" in TEXT
    assert f"There is one kind, {SEAL}, the last batch of a sealed partition" in TEXT
    assert f"This is version {m.MAX_VERSION}." in TEXT


def test_the_limits_are_the_code() -> None:
    limits = Listening()
    assert [row[1] for row in table(PAGE, "Limits")] == [
        format_bytes(limits.first_frame_bytes),
        f"{format_bytes(limits.max_frame_bytes)}, or as `Welcome` says",
        format_duration(limits.unauthenticated_ms).replace("s", " s"),
        f"{limits.requests_at_once:,}",
        f"{limits.polls_at_once:,}",
        format_bytes(limits.request_bytes),
        f"{format_bytes(limits.one_answer_bytes)} of batches and {session._MOST_MESSAGES:,} messages; one "
        "batch always",
        f"{format_bytes(limits.answer_bytes)}; {format_bytes(limits.all_answer_bytes)} of all, half of it "
        "of one principal",
    ]
    assert f"waited for, {limits.answer_wait_ms // 1000} s at most" in TEXT
    assert f"for {limits.slow_reader_ms // 1000} s is cut off" in TEXT
    assert f"nothing for {limits.silent_ms // 1000} s while no request" in TEXT
    assert f"{limits.frame_ms // 1000} s after it began" in TEXT
    assert f"is heard for {DEFAULTS.tuning.wire.silence_s:g} s after it" in TEXT
    assert f"at most {DEFAULTS.in_flight_batches} batches per partition" in TEXT
    batch = f"{format_bytes(DEFAULTS.max_batch_bytes)} and {DEFAULTS.max_batch_messages:,} messages"
    assert f"A batch is at most {batch}" in TEXT
    assert f"(`wait_ms`, {DEFAULTS.poll_wait_ms // 1000} s at most)" in TEXT


def test_the_limits_of_headers_are_the_code() -> None:
    kinds = {one.name: one.request.most_bytes for one in every_operation()}
    kinds |= {"Hello": m.Hello.most_bytes, "Answer": r.Answer.most_bytes}
    said = {name.strip(" `"): row[0] for row in table(LIMITS, "Headers") for name in row[1].split(",")}
    small = r.Request.most_bytes
    assert said == {name: format_bytes(most) for name, most in kinds.items() if most > small}
    assert f"at most {format_bytes(small)}, but for these" in LIMITS.read_text(encoding="utf-8")


def test_the_limits_of_texts_and_lists_are_the_code() -> None:
    said = {int(row[0].split()[0]) for row in table(LIMITS, "Texts and lists")}
    shapes = [shape for one in every_operation() for _, shape in walked(one.request)]
    assert said == {shape.longest for shape in shapes if shape.longest is not None}
    for name, _ in (pair for row in table(LIMITS, "Texts and lists") for pair in _named(row)):
        assert any(path.replace("[]", "").endswith(f".{name}") for one in every_operation()
                   for path, _ in walked(one.request)), name  # fmt: skip


def _named(row: tuple[str, ...] | list[str]) -> list[tuple[str, str]]:
    """The fields that a line names, and their bound."""
    return [(name, row[0]) for name in re.findall(r"`([a-z_]+)`", row[1])]


def test_a_session_is_shown_with_the_names_there_are() -> None:
    (session,) = (block.text for block in blocks(PAGE) if "→ 1" in block.text)
    said = re.findall(r"^[→←] \d+ +(\w+)", session, re.MULTILINE)
    known = {*(one.name for one in every_operation()), *value_rows()}
    assert said
    assert set(said) <= known
