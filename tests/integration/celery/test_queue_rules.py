"""What kombu is told about a message and a queue on Postroom: no worker in between."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kombu")

from kombu import Connection
from kombu.simple import SimpleQueue

import postroom.integrations.celery
import postroom.sync

from .shops import LONG, until

ATTEMPTS = 3


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/queue.db"


@pytest.fixture
def jobs(url: str) -> Iterator[SimpleQueue]:
    options = {"max_attempts": ATTEMPTS}
    made = Connection(f"postroom+{url}", transport_options=options)
    with made as connection, connection.SimpleQueue("jobs") as queue:
        yield queue


def redelivered(message: Any) -> bool:
    return bool(message.delivery_info["redelivered"])


def test_a_message_that_was_requeued_comes_again_and_says_so(jobs: SimpleQueue) -> None:
    jobs.put("one")
    first = jobs.get(timeout=LONG)
    first.requeue()
    again = jobs.get(timeout=LONG)
    assert (redelivered(first), redelivered(again), again.payload) == (False, True, "one")
    again.ack()


def test_a_message_that_is_requeued_for_ever_is_a_dead_letter(jobs: SimpleQueue, url: str) -> None:
    jobs.put("poison")
    for _ in range(ATTEMPTS):
        jobs.get(timeout=LONG).requeue()
    with postroom.sync.connect(url) as mq:
        until(lambda: mq.dead_letters("jobs", "celery"))
        (letter,) = mq.dead_letters("jobs", "celery")
    assert "requeued" in letter.reason


def test_a_property_that_nobody_can_write_down_is_left_out_and_the_message_is_sent(jobs: SimpleQueue) -> None:
    jobs.put("one", signal=object(), correlation_id="7")
    message = jobs.get(timeout=LONG)
    assert message.payload == "one" and message.properties["correlation_id"] == "7"
    assert "signal" not in message.properties
    message.ack()
