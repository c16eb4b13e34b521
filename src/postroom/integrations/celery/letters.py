"""Letters: a message of kombu's as one of Postroom's, and back.

The body is the value, as it is, so that `postroom read` shows a task's arguments; everything else (headers,
properties, content type) is JSON in the header `celery`. Decides when a message is due: a task with an ETA or
a countdown waits in the schedule, and in no worker. Must never fail on what it did not write: a message that
anybody sent to the topic is handed to Celery as data, and Celery says what it thinks of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from kombu.utils.json import dumps, loads

from ...client.message import Received

__all__ = ["due", "lives", "opened", "routing_key", "written"]

_ABOUT = "celery"
_TASK = "task"
_UNKNOWN = {"content-type": "application/data", "content-encoding": "binary"}


def written(message: Mapping[str, Any]) -> tuple[bytes, dict[str, str]]:
    """Return the value and the headers for what kombu prepared."""
    body = message["body"]
    value = body.encode("utf-8") if isinstance(body, str) else bytes(body or b"")
    about = {name: part for name, part in message.items() if name != "body"}
    headers = {_ABOUT: dumps(about | {"properties": _kept(about["properties"])})}
    task = (message.get("headers") or {}).get("task")
    return value, headers | ({_TASK: task} if isinstance(task, str) else {})


def _kept(properties: Mapping[str, Any]) -> dict[str, Any]:
    """Those that can be written. AMQP, too, leaves out those that it does not know."""
    return {name: value for name, value in properties.items() if _can_be_written(value)}


def _can_be_written(value: Any) -> bool:
    if value is None or isinstance(value, str | int | float):
        return True
    try:
        dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def opened(message: Received, tag: int) -> dict[str, Any]:
    """Return what kombu's message is made of."""
    try:
        about = loads(message.headers[_ABOUT])
        found = {"headers": {}, **about, "properties": dict(about["properties"])}
    except (KeyError, TypeError, ValueError):
        found = {**_UNKNOWN, "headers": {}, "properties": {}}
    properties = found["properties"]
    properties["delivery_tag"] = tag
    info = properties.get("delivery_info")
    properties["delivery_info"] = {
        "exchange": "",
        "routing_key": message.topic,
        **(info if isinstance(info, dict) else {}),
        "redelivered": message.attempt > 1,
    }
    return {**found, "body": message.value}


def routing_key(payload: Mapping[str, Any]) -> str:
    return str(payload["properties"]["delivery_info"].get("routing_key") or "")


def due(message: Mapping[str, Any]) -> datetime | None:
    """Return when a task with an ETA is to be delivered; None: now.

    An ETA without a time zone is meant in the time zone of Celery's app, which is not known here. It is
    taken for the earlier of what it can mean, and the worker waits for the rest.
    """
    eta = (message.get("headers") or {}).get("eta")
    if not eta:
        return None
    try:
        moment = eta if isinstance(eta, datetime) else datetime.fromisoformat(str(eta))
        if moment.tzinfo is None:
            moment = min(moment.astimezone(), moment.replace(tzinfo=UTC))
    except (ValueError, OverflowError, OSError):
        return None  # the worker says what is wrong with it
    return moment


def lives(message: Mapping[str, Any]) -> timedelta | None:
    """Return for how long the message is worth delivering: AMQP's `expiration`, in milliseconds as text."""
    given = (message.get("properties") or {}).get("expiration")
    try:
        return None if given is None else timedelta(milliseconds=max(1, int(given)))
    except (TypeError, ValueError):
        return None
