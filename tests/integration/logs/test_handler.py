"""`PostroomHandler`: records become messages; the program never waits, fails or loops for it."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import postroom.sync
from postroom.integrations.logging import PostroomHandler
from tests.servers.places import free_port
from tests.tuned import Tune

PATIENCE = 60
SHORT_PROGRAM = """
import logging, os
from postroom.integrations.logging import PostroomHandler

logging.basicConfig(level=logging.DEBUG, handlers=[PostroomHandler("logs", "sqlite:///queue.db")])
logging.getLogger("shop").info("of the parent")
child = os.fork()
if child == 0:
    logging.getLogger("shop").info("of the child")
else:
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.fixture
def url(tmp_path: Path) -> str:
    found = f"sqlite:///{tmp_path / 'queue.db'}"
    with postroom.sync.connect(found) as mq:
        mq.create_topic("logs", partitions=2)
    return found


@pytest.fixture
def shop() -> Iterator[logging.Logger]:
    logger = logging.Logger("shop", logging.DEBUG)
    yield logger
    for handler in logger.handlers:
        handler.close()


def stored(url: str) -> list[Any]:
    with postroom.sync.connect(url) as mq:
        return sorted(mq.read("logs"), key=lambda message: message.timestamp_ms)


def handler_of(shop: logging.Logger, url: str, **options: Any) -> PostroomHandler:
    handler = PostroomHandler("logs", url, **options)
    shop.addHandler(handler)
    return handler


def test_a_record_becomes_a_message_with_its_number_and_what_was_added(
    shop: logging.Logger, url: str
) -> None:
    handler = handler_of(shop, url)
    handler.setFormatter(logging.Formatter("for people: %(message)s"))  # as basicConfig does
    try:
        raise ValueError("negative")
    except ValueError:
        shop.exception("order %d", 7, extra={"order": 7, "odd": {1: object()}, "torn": "\ud800"})
    shop.info("done", extra={"total": 990})
    assert handler.flushed(PATIENCE)
    first, second = stored(url)
    body = json.loads(first.value)
    assert (body["level"], body["logger"], body["message"]) == ("ERROR", "shop", "order 7")
    assert (
        body["traceback"].endswith("ValueError: negative\n") and body["order"] == "7"
    )  # as it could be written
    assert json.loads(second.value)["total"] == 990
    assert [m.header("seq") for m in (first, second)] == ["0", "1"]
    assert first.header("producer") == second.header("producer") == handler.producer
    assert (handler.sent, handler.dropped) == (2, 0)


def test_the_program_does_not_wait_for_a_queue_that_is_away_and_memory_is_bounded(
    tune: Tune, shop: logging.Logger
) -> None:
    tune(client={"logs_flush_s": 0.1})  # the end of the test is that of a program
    handler = handler_of(shop, f"postroom://127.0.0.1:{free_port()}", buffer_bytes="10 KB")
    for number in range(1000):
        shop.info("order %d", number)
    assert 0 < handler.dropped < 1000 and handler.sent == 0
    assert not handler.flushed("10ms")


def test_a_spool_keeps_records_while_the_queue_is_away(shop: logging.Logger, tmp_path: Path) -> None:
    spool = tmp_path / "logs.spool"
    handler = handler_of(shop, f"postroom://127.0.0.1:{free_port()}", spool=spool)
    for number in range(50):
        shop.info("order %d", number)
    assert handler.flushed(PATIENCE) and (handler.sent, handler.dropped) == (50, 0)
    handler.close()
    url = f"sqlite:///{tmp_path / 'queue.db'}"
    with postroom.sync.connect(url) as mq:
        mq.create_topic("logs")
    with postroom.sync.Spool(spool, url) as opened:
        assert opened.forwarded(timeout=PATIENCE)
    assert len(stored(url)) == 50


def test_records_wait_for_a_topic_that_is_made_later(shop: logging.Logger, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'queue.db'}"
    handler = handler_of(shop, url)
    shop.info("early")
    assert not handler.flushed("300ms") and handler.dropped == 0
    with postroom.sync.connect(url) as mq:
        mq.create_topic("logs")
    assert handler.flushed(PATIENCE) and handler.sent == 1


def test_what_postroom_logs_while_it_sends_does_not_come_back(url: str) -> None:
    root = logging.getLogger()
    before, handler = root.level, PostroomHandler("logs", url)
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        for name in ("postroom.producer", "postroom.store", "postroom"):
            logging.getLogger(name).error("of our own")
        client = threading.Thread(
            target=lambda: logging.getLogger("asyncio").debug("x"), name="postroom-loop"
        )
        client.start()
        client.join(PATIENCE)
        logging.getLogger("postroom.app").error("handler bill failed")  # of the program's handlers
        logging.getLogger("shop").info("an order")
        assert handler.flushed(PATIENCE)
    finally:
        root.removeHandler(handler)
        root.setLevel(before)
        handler.close()
    assert [json.loads(m.value)["logger"] for m in stored(url)] == ["postroom.app", "shop"]


def test_a_record_whose_text_logs_or_fails_does_no_harm(
    shop: logging.Logger, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    class Chatty:
        def __str__(self) -> str:
            shop.info("from inside")
            return "chatty"

    class Broken:
        def __str__(self) -> str:
            raise RuntimeError("no text")

    handler = handler_of(shop, url)
    shop.info("%s", Chatty())
    shop.info("%s", Broken())
    shop.info("after")
    assert handler.flushed(PATIENCE) and (handler.sent, handler.dropped) == (2, 1)
    assert [json.loads(m.value)["message"] for m in stored(url)] == ["chatty", "after"]
    assert "no text" in capsys.readouterr().err  # as every handler of logging tells it


def test_a_short_program_and_its_child_lose_nothing(tmp_path: Path, url: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SHORT_PROGRAM],
        cwd=tmp_path,
        timeout=PATIENCE,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    messages = sorted(json.loads(message.value)["message"] for message in stored(url))
    assert messages == ["of the child", "of the parent"]
