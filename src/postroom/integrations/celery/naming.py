"""Names: which topics and groups stand for Celery's queues and exchanges.

A queue is the topic of its own name, read by the group `celery`. A queue that goes with its owner (replies,
events) is `celery.tmp.<queue>`. A named exchange is a topic, and each queue that is bound to it a group
there: of type "direct" one topic for each routing key, else one for all keys. Names that Postroom does not
allow are made to fit, and unlike any other by a digest, so that the same name is the same topic in every
process. Pure. Must never map two names to one.
"""

from __future__ import annotations

import re
from hashlib import blake2b

from ...errors import InvalidName
from ...model.topology.names import check_group, check_topic

__all__ = ["QUEUE_GROUP", "TEMPORARY", "exchange_topic", "fitted", "key_topic", "queue_group", "queue_topic"]

QUEUE_GROUP = "celery"
"""The group in which all workers share a queue."""

TEMPORARY = "celery.tmp."
"""How the topics of queues begin that go with their owner."""

_EXCHANGE = "celery.exchange."
_LONGEST_TOPIC = 80  # leaves room for the names of dead letters behind it
_LONGEST_GROUP = 40


def queue_topic(queue: str, *, temporary: bool = False) -> str:
    return fitted(f"{TEMPORARY}{queue}" if temporary else queue)


def exchange_topic(exchange: str) -> str:
    """The topic of an exchange that is not of type "direct"."""
    return fitted(f"{_EXCHANGE}{exchange}")


def key_topic(exchange: str, key: str) -> str:
    """The topic of one routing key of a direct exchange; where both are named like a queue, that queue's."""
    if exchange == key:
        return queue_topic(key)
    return _with_digest(f"{_EXCHANGE}{exchange}.{key}", repr((exchange, key)), _LONGEST_TOPIC)


def queue_group(queue: str) -> str:
    """The group of a queue in the topics of the exchanges that it is bound to.

    >>> queue_group("video"), queue_group("celery@web-1.celery.pidbox")
    ('queue-video', 'queue-celery-web-1-celery-pidbox-6fb6dbd9c4c1')
    """
    name = f"queue-{queue}"
    try:
        return check_group(name) if len(name) <= _LONGEST_GROUP else _group_with_digest(name)
    except InvalidName:
        return _group_with_digest(name)


def fitted(name: str) -> str:
    """The name itself if a topic may be called so, else one that looks like it.

    >>> fitted("celery"), fitted("mails:high")
    ('celery', 'mails-high-0d98ee2f8d3b')
    """
    try:
        return check_topic(name) if len(name) <= _LONGEST_TOPIC else _with_digest(name, name, _LONGEST_TOPIC)
    except InvalidName:
        return _with_digest(name, name, _LONGEST_TOPIC)


def _group_with_digest(name: str) -> str:
    return _with_digest(name.replace(".", "-"), name, _LONGEST_GROUP)


def _with_digest(name: str, whole: str, longest: int) -> str:
    digest = blake2b(whole.encode(errors="replace"), digest_size=6).hexdigest()
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip("_.-") or "queue"
    return f"{readable[: longest - len(digest) - 1]}-{digest}"
