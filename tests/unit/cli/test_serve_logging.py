"""Lines of a served broker's log: one an event, with fields, and never a token."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Any

import pytest

from postroom.cli.framework.log_lines import JsonLines, TextLines, fields, logging_to_stderr
from postroom.serve_settings import ServeSettings

TOKEN = "pst_" + "S3cret-_" * 5 + "abc"


def record(message: str, *args: Any, error: BaseException | None = None, **facts: Any) -> logging.LogRecord:
    info = (type(error), error, error.__traceback__) if error else None
    made = logging.LogRecord("postroom.serve", logging.INFO, "f", 1, message, args, info)
    made.created = 1_700_000_000.5
    made.__dict__.update(fields(**facts))
    return made


def test_text_for_people() -> None:
    line = TextLines().format(record("a %s\nevent", "small", port=7070, tls=False, why='say "no"', zone=""))
    assert line == (
        "2023-11-14T22:13:20.500Z INFO postroom.serve a small event "
        r'port=7070 tls=false why="say \"no\"" zone=""'
    )


def test_json_for_machines() -> None:
    line = JsonLines().format(record("a %s\nevent", "small", port=7070, tls=False))
    assert "\n" not in line
    assert json.loads(line) == {
        "time": "2023-11-14T22:13:20.500Z",
        "level": "info",
        "logger": "postroom.serve",
        "message": "a small\nevent",
        "port": 7070,
        "tls": False,
    }


@pytest.mark.parametrize("kind", [JsonLines, TextLines])
def test_a_token_is_cut_out_wherever_it_stands(kind: type[logging.Formatter]) -> None:
    try:
        raise ValueError(f"wrong: {TOKEN}")
    except ValueError as error:
        line = kind().format(record("from %s", TOKEN, error=error, header=f"Bearer {TOKEN}"))
    assert TOKEN not in line and TOKEN[8:] not in line and line.count("pst_…") == 3
    assert "ValueError" in line


def test_it_goes_to_stderr_at_the_level_that_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    root, ours = logging.getLogger(), logging.getLogger("postroom")
    before = (root.handlers[:], root.level, ours.level)
    with logging_to_stderr("text", "warning"):
        logging.getLogger("postroom.wire").info("quiet")
        logging.getLogger("postroom.wire").warning("loud")
        logging.getLogger("uvicorn.error").info("chatter")
        logging.getLogger("elsewhere").warning("worth a line")
    assert (root.handlers, root.level, ours.level) == before
    captured = capsys.readouterr()
    assert captured.out == "" and "loud" in captured.err and "worth a line" in captured.err
    assert "quiet" not in captured.err and "chatter" not in captured.err


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        (ServeSettings(), []),
        (ServeSettings(host="0.0.0.0"), ["tokens and messages cross the network"]),
        (ServeSettings(host="0.0.0.0", tls_cert="a", tls_key="b"), []),
        (ServeSettings(dev=True), ["dev mode: anyone on this machine"]),
    ],
)
def test_what_a_start_warns_of(
    settings: ServeSettings, warned: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    from postroom.cli.operate.serve import say_serving

    caplog.set_level(logging.INFO, "postroom")
    say_serving(replace(settings, url="postgresql://ann:hunter2@host/q"), "postroom://here:7070", None)
    first, *others = caplog.records
    assert [record.levelname for record in others] == ["WARNING"] * len(warned)
    assert all(record.message.startswith(text) for record, text in zip(others, warned, strict=True))
    facts = getattr(first, "fields")  # noqa: B009
    assert (first.message, facts["url"], facts["http"]) == ("serving", "postroom://here:7070", "off")
    assert "hunter2" not in JsonLines().format(first) and "ann@host" in facts["store"]


def test_listening_has_the_defaults_of_the_settings() -> None:
    """The server's own defaults are for programs that make one by hand; they must not differ."""
    from postroom.cli.operate.serve import listening
    from postroom.wire.server.listening import Listening

    assert listening(ServeSettings()) == Listening()


def test_every_setting_reaches_the_server() -> None:
    from postroom.cli.operate.serve import listening

    settings = ServeSettings(
        host="::1", port=1, zone="z", advertise="a:1", max_connections=2, max_frame_bytes=10 << 20,
        unauthenticated_ms=3, idle_ms=4, max_answer_bytes=5, answers_bytes=400, slow_reader_ms=6,
    )  # fmt: skip
    found = listening(settings)
    assert (found.host, found.port, found.zone, found.advertise) == ("::1", 1, "z", "a:1")
    assert (found.max_connections, found.max_frame_bytes) == (2, 10 << 20)
    assert (found.unauthenticated_ms, found.silent_ms) == (3, 4)
    assert (found.one_answer_bytes, found.all_answer_bytes, found.slow_reader_ms) == (5, 400, 6)
    assert found.answer_bytes == 100


async def test_the_brokers_limit_is_the_setting() -> None:
    from postroom.cli.operate.serve import _open

    broker = await _open(ServeSettings(url="memory://limited", reply_topics=7, http_port=0))
    try:
        assert broker._limits.reply_topics == 7
    finally:
        await broker.close()
