"""What Celery's names and messages are in Postroom: pure, without a queue."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery.exceptions import ImproperlyConfigured

from postroom.integrations.celery import letters, naming
from postroom.integrations.celery.queues import Binding, Queue
from postroom.integrations.celery.results import NoResults
from postroom.integrations.celery.transport import Transport
from postroom.model.topology.names import check_group, check_topic

ODD = ["mails:high", "a b", "_hidden", "orders.dead", "x" * 300, "é", "celery@host.celery.pidbox", "a/b"]


@pytest.mark.parametrize("name", ODD)
def test_a_name_that_is_not_allowed_is_made_to_fit(name: str) -> None:
    assert check_topic(naming.queue_topic(name)) != name
    assert check_topic(naming.queue_topic(name, temporary=True))
    assert check_topic(naming.exchange_topic(name))
    assert check_topic(naming.key_topic("exchange", name))
    assert check_group(naming.queue_group(name))


def test_no_two_names_are_one_topic() -> None:
    names = [*ODD, "celery", "a-b", "a.b", "mails-high", "x" * 301]
    assert len({naming.queue_topic(name) for name in names}) == len(names)
    assert len({naming.queue_group(name) for name in names}) == len(names)
    assert naming.key_topic("a.b", "c") != naming.key_topic("a", "b.c")


def test_a_queue_bound_by_its_own_name_has_one_topic() -> None:
    """As Celery's default queue is."""
    queue = Queue("celery", bindings={Binding("celery", "direct", "celery")})
    assert [(one.topic, one.group) for one in queue.sources()] == [("celery", "celery")]


def test_a_queue_takes_what_one_of_its_patterns_fits() -> None:
    bindings = {Binding("news", "topic", "task.#"), Binding("news", "topic", "worker.*")}
    (source,) = Queue("monitor", temporary=True, bindings=bindings, own=False).sources()
    taken = [
        key for key in ("task.sent", "task.a.b", "worker.online", "worker.a.b", "x") if source.takes(key)
    ]
    assert taken == ["task.sent", "task.a.b", "worker.online"]


def message(**headers: Any) -> dict[str, Any]:
    return {"body": "[]", "headers": headers, "properties": {}}


def test_a_task_is_due_at_its_eta() -> None:
    eta = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert letters.due(message(eta=eta.isoformat())) == eta
    assert letters.due(message(eta=None)) is None
    assert letters.due(message()) is None
    assert letters.due(message(eta="tomorrow")) is None  # the worker says what is wrong with it


def test_an_eta_without_a_time_zone_never_comes_too_late() -> None:
    bare = datetime(2030, 1, 2, 3, 4, 5)
    found = letters.due(message(eta=bare.isoformat()))
    assert found is not None
    assert found <= bare.replace(tzinfo=UTC)
    assert found <= bare.astimezone()


def test_amqps_expiration_is_in_milliseconds() -> None:
    assert letters.lives({"properties": {"expiration": "1500"}}) == timedelta(seconds=1.5)
    assert letters.lives({"properties": {"expiration": "soon"}}) is None
    assert letters.lives({"properties": {}}) is None


def test_a_result_backend_is_refused_with_what_to_use() -> None:
    with pytest.raises(ImproperlyConfigured, match="rpc://"):
        NoResults(app=None)


def test_an_address_is_shown_without_its_password() -> None:
    shown = Transport.as_uri
    assert shown(None, "postgresql://ann:pw@host/db") == "postroom+postgresql://ann:**@host/db"
    assert shown(None, "postroom://a:7070,b:7070") == "postroom://a:7070,b:7070"
    assert "pw" in shown(None, "mysql://ann:pw@host/db", include_password=True)
