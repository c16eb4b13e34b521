"""What may be written behind `.option(...)` when a topic is read, and what it means.

Turns the words of the Kafka source into one typed value, `ReadOptions`, and refuses what is unknown,
contradictory or out of range, with the option's name and what to write instead. Opens nothing and imports
nothing of Spark. Must never show a token or an address: they are in no repr and in no message.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeVar

from ..address import parse
from ..config import DEFAULTS
from ..errors import InvalidSetting
from ..model.topology.names import check_group, check_topic
from ..units import duration_ms
from .planning import TopicPartition

__all__ = [
    "CONNECTION",
    "EARLIEST",
    "FORMATS",
    "LATEST",
    "Position",
    "Reach",
    "ReadOptions",
    "Topics",
    "bad_option",
    "kind_options",
    "reach_options",
    "read_options",
    "unknown_option",
]

T = TypeVar("T")

CONNECTION = ("url", "token", "tls", "unreachableTimeout")
"""How the queue is reached; `url.NAME` is the address of a further shard."""

FORMATS = (
    "valueFormat",
    "valueSchema",
    "valueMessage",
    "valueErrors",
    "keyFormat",
    "schemaRegistry",
    "schemaSubject",
    "schemaRegistryUser",
    "schemaRegistryPassword",
    "schemaRegistryToken",
)
"""What keys and values are, which `formats.typed` reads."""

_TOPICS = ("subscribe", "subscribePattern", "assign")
_START = ("startingOffsets", "startingTimestamp", "startingOffsetsByTimestamp")
_END = ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp")
_STRATEGY = "startingOffsetsByTimestampStrategy"
_STREAM = ("maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay", "group")
_BOTH = ("minPartitions", "maxRecordsPerPartition", "failOnDataLoss", "includeHeaders", "includeSource")
_BATCH = _END
_READ = (*CONNECTION, *_TOPICS, *_START, _STRATEGY, *_BATCH, *_STREAM, *_BOTH, *FORMATS)
_INSTEAD = {
    "path": "load() takes no path: name the topic with the option subscribe",
    "topic": "the option topic is for writing; name what is read with the option subscribe",
    "topics": "name the topics with the option subscribe, with commas between them",
    "kafka.bootstrap.servers": "name the queue with the option url, such as postroom://host:7070",
    "kafka.group.id": "a group that shows the lag and holds retention is the option group",
    "pushfilters": (
        "conditions are not pushed down, for Spark would apply them to every use of the DataFrame: leave it "
        "out, and narrow down what is read with startingOffsets, endingOffsets, their times, or assign"
    ),
    "groupidprefix": "a group that shows the lag and holds retention is the option group",
}
_SHARD = re.compile(r"url\.([A-Za-z0-9-]{1,60})")

EARLIEST, LATEST = -2, -1
"""In offsets by partition: the oldest that is kept, and behind the newest."""


@dataclass(frozen=True, slots=True)
class Reach:
    """How the queue is reached."""

    url: str = field(repr=False)
    token: str | None = field(default=None, repr=False)
    tls: str | None = None
    shards: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    wait_ms: int = DEFAULTS.spark_wait_ms  # for brokers or databases that cannot be reached


@dataclass(frozen=True, slots=True)
class Topics:
    """Which partitions are read: of topics by name, of those that a pattern fits, or single ones."""

    names: tuple[str, ...] = ()
    pattern: str = ""
    partitions: frozenset[TopicPartition] = frozenset()

    def takes(self, topic: str) -> bool:
        return topic in self.names or bool(self.pattern and re.fullmatch(self.pattern, topic))

    def __str__(self) -> str:
        return f"pattern {self.pattern!r}" if self.pattern else ", ".join(map(repr, self.names))


@dataclass(frozen=True, slots=True)
class Position:
    """Where reading begins or ends. `at`: offsets or moments of single partitions."""

    option: str
    kind: Literal["earliest", "latest", "offsets", "time", "times"]
    time_ms: int = 0
    at: Mapping[TopicPartition, int] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class ReadOptions:
    reach: Reach
    topics: Topics
    start: Position
    end: Position
    or_latest: bool = False  # a moment after the newest message: the end, and not an error
    max_offsets: int | None = None
    min_offsets: int | None = None
    max_delay_ms: int = 15 * 60_000
    min_partitions: int | None = None
    max_records: int | None = None
    fail_on_data_loss: bool = True
    headers: bool = False
    source: bool = False
    group: str | None = None


def read_options(options: Mapping[str, str], *, streaming: bool) -> ReadOptions:
    given = _named(options)
    _refuse_of_other_kind(given, streaming)
    start = _position(given, _START, "latest" if streaming else "earliest")
    end = _position(given, _END, "latest")
    topics = _topics(given)
    if not streaming:
        _refuse_empty(start, LATEST, "latest", "a batch read begins before the end: use earliest, or offsets")
        _refuse_empty(end, EARLIEST, "earliest", "a batch read ends behind its start: use latest, or offsets")
    for position in (start, end):
        _check_places(position, topics)
    least, most = _number(given, "minOffsetsPerTrigger"), _number(given, "maxOffsetsPerTrigger")
    if least is not None and most is not None and least > most:
        raise bad_option("minOffsetsPerTrigger", f"{least} is more than maxOffsetsPerTrigger, {most}")
    if "maxTriggerDelay" in given and least is None:
        raise bad_option("maxTriggerDelay", "it goes with minOffsetsPerTrigger: give both, or neither")
    return ReadOptions(
        reach=_reach(given),
        topics=topics,
        start=start,
        end=end,
        or_latest=_choice(given, _STRATEGY, {"error": False, "latest": True}, False),
        max_offsets=most,
        min_offsets=least,
        max_delay_ms=_parsed(given, "maxTriggerDelay", _delay_ms, 15 * 60_000),
        min_partitions=_number(given, "minPartitions"),
        max_records=_number(given, "maxRecordsPerPartition"),
        fail_on_data_loss=_flag(given, "failOnDataLoss", True),
        headers=_flag(given, "includeHeaders", False),
        source=_flag(given, "includeSource", False),
        group=_parsed(given, "group", check_group, None),
    )


def reach_options(options: Mapping[str, str]) -> Reach:
    """The part of the options that reading and writing share; the others are not looked at."""
    names = {name.lower(): name for name in CONNECTION}
    lower = {name.lower(): value for name, value in options.items()}
    return _reach({names.get(n, n): v for n, v in lower.items() if n in names or n.startswith("url.")})


def kind_options(kind: Literal["batch", "stream"]) -> tuple[str, ...]:
    """The names that a read of this kind takes."""
    other = _STREAM if kind == "batch" else _BATCH
    return tuple(name for name in _READ if name not in other)


def bad_option(name: str, text: str) -> InvalidSetting:
    return InvalidSetting(f"option {name}: {text}", option=name)


def unknown_option(name: str, known: tuple[str, ...]) -> InvalidSetting:
    lower = {one.lower(): one for one in known}
    close = get_close_matches(name.lower(), lower, n=2, cutoff=0.6)
    hint = (
        f"did you mean {' or '.join(lower[one] for one in close)}?"
        if close
        else f"there are {', '.join(known)}"
    )
    return InvalidSetting(f"there is no option {name}: {hint}", option=name)


# ---- which are there ----


def _named(options: Mapping[str, str]) -> dict[str, str]:
    """By the names as they are written here; Spark does not tell upper from lower case."""
    names = {name.lower(): name for name in _READ}
    given: dict[str, str] = {}
    for name, value in options.items():
        lower = name.lower()
        if lower in names:
            given[names[lower]] = str(value).strip()
        elif lower.startswith("url."):
            given[lower] = str(value).strip()
        elif lower in _INSTEAD:
            raise InvalidSetting(f"option {name}: {_INSTEAD[lower]}", option=name)
        else:
            raise unknown_option(name, _READ)
    return given


def _refuse_of_other_kind(given: Mapping[str, str], streaming: bool) -> None:
    for name in _BATCH if streaming else _STREAM:
        if name in given:
            other = "batch reads (spark.read)" if streaming else "streams (spark.readStream)"
            raise bad_option(name, f"it is for {other}: leave it out")


def _only(given: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    found = [name for name in names if name in given]
    if len(found) > 1:
        raise bad_option(found[0], f"it contradicts {' and '.join(found[1:])}: give one of them")
    return found[0] if found else None


# ---- the queue ----


def _reach(given: Mapping[str, str]) -> Reach:
    url = given.get("url", "")
    if not url:
        raise bad_option(
            "url", "it is missing: name the queue, such as postroom://host:7070 or sqlite:////a/file.db"
        )
    address = parse(url)
    if address.kind == "memory":
        raise bad_option(
            "url",
            "memory:// is seen by one process only, and Spark has several: use a file, a server or a broker",
        )
    if address.kind == "sqlite":
        assert address.path is not None
        url = f"sqlite:////{str(Path(address.path).absolute()).lstrip('/')}"
    if "token" in given and address.kind != "postroom":
        raise bad_option("token", "it is for brokers (postroom://…), and url names a database: leave it out")
    if "tls" in given and address.kind != "postroom":
        raise bad_option("tls", "it is for brokers (postroom://…), and url names a database: leave it out")
    shards = [(match[1], value) for name, value in given.items() if (match := _SHARD.fullmatch(name))]
    if len(shards) < sum(name.startswith("url.") for name in given):
        raise bad_option("url.NAME", "the name of a shard has letters, digits and '-', 60 at most")
    if shards and address.kind == "postroom":
        raise bad_option(f"url.{shards[0][0]}", "the broker knows its shards itself: leave it out")
    token = given.get("token")
    if token is None and address.kind == "postroom":  # of the driver: executors may have another environment
        token = os.environ.get("POSTROOM_TOKEN") or None
    wait_ms = _parsed(given, "unreachableTimeout", _wait_ms, DEFAULTS.spark_wait_ms)
    return Reach(url, token, given.get("tls"), tuple(sorted(shards)), wait_ms)


# ---- topics ----


def _topics(given: Mapping[str, str]) -> Topics:
    chosen = _only(given, _TOPICS)
    if chosen is None:
        raise bad_option("subscribe", "it is missing: name a topic, or use subscribePattern or assign")
    text = given[chosen]
    if chosen == "subscribePattern":
        try:
            re.compile(text)
        except re.error as error:
            raise bad_option(chosen, f"{text!r} is no regular expression: {error}") from None
        return Topics(pattern=text)
    if chosen == "subscribe":
        names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
        if not names:
            raise bad_option(chosen, "it names no topic")
        return Topics(names=tuple(_topic(chosen, name) for name in names))
    listed = _json(chosen, text, '{"orders": [0, 1]}')
    places = set()
    for topic, numbers in listed.items():
        if (
            not isinstance(numbers, list)
            or not numbers
            or not all(type(n) is int and n >= 0 for n in numbers)
        ):
            raise bad_option(chosen, f"the partitions of {topic!r} are numbers, such as [0, 1]")
        places |= {(_topic(chosen, topic), number) for number in numbers}
    if not places:
        raise bad_option(chosen, "it names no partition")
    return Topics(names=tuple(listed), partitions=frozenset(places))


def _topic(option: str, name: str) -> str:
    return _told(option, lambda: check_topic(name))


# ---- where reading begins and ends ----


def _position(
    given: Mapping[str, str], names: tuple[str, ...], otherwise: Literal["earliest", "latest"]
) -> Position:
    plain, moment, moments = names
    chosen = _only(given, names)
    if chosen is None:
        return Position(plain, otherwise)
    text = given[chosen]
    if chosen == moment:
        return Position(chosen, "time", time_ms=_whole(chosen, text, "milliseconds since 1970"))
    if chosen == plain and text.lower() in ("earliest", "latest"):
        return Position(chosen, "earliest" if text.lower() == "earliest" else "latest")
    example = '{"orders": {"0": 23, "1": -1}}' if chosen == plain else '{"orders": {"0": 1700000000000}}'
    listed = _json(chosen, text, f"earliest, latest or {example}" if chosen == plain else example)
    if chosen == plain and "topics" in listed and "v" in listed:
        listed = listed["topics"]  # as it stands in a checkpoint
    at = {}
    for topic, numbers in listed.items():
        if not isinstance(numbers, dict):
            raise bad_option(chosen, f"of each topic it has what its partitions begin at, such as {example}")
        for number, value in numbers.items():
            lowest = EARLIEST if chosen == plain else 0
            if not str(number).isdecimal() or type(value) is not int or value < lowest:
                raise bad_option(chosen, f"{topic!r} {number!r}: {value!r} is not as in {example}")
            at[(topic, int(number))] = value
    if not at:
        raise bad_option(chosen, f"it names no partition; write {example}")
    return Position(chosen, "times" if chosen == moments else "offsets", at=at)


def _refuse_empty(position: Position, value: int, word: str, text: str) -> None:
    if position.kind == word or (position.kind == "offsets" and value in position.at.values()):
        raise bad_option(position.option, text)


def _check_places(position: Position, topics: Topics) -> None:
    for topic, number in position.at:
        if not topics.takes(topic) or (topics.partitions and (topic, number) not in topics.partitions):
            raise bad_option(
                position.option, f"it names {topic!r} partition {number}, which is not read: {topics} is"
            )


# ---- single values ----


def _told(option: str, read: Callable[[], T]) -> T:
    try:
        return read()
    except ValueError as error:
        raise bad_option(option, str(error)) from None
    except InvalidSetting as error:
        raise bad_option(option, str(error)) from None
    except Exception as error:
        raise bad_option(option, str(error)) from error


def _parsed(given: Mapping[str, str], name: str, read: Callable[[str], T], otherwise: T | None) -> T:
    if name not in given:
        return otherwise  # type: ignore[return-value]
    return _told(name, lambda: read(given[name]))


def _delay_ms(text: str, name: str = "maxTriggerDelay") -> int:
    return duration_ms(float(text) / 1000 if text.isdecimal() else text, name=name)


def _wait_ms(text: str) -> int:
    found = _delay_ms(text, "unreachableTimeout")
    if not 1000 <= found <= 86_400_000:
        raise ValueError(f"{text!r}: from 1s to 1d, such as 60s")
    return found


def _number(given: Mapping[str, str], name: str) -> int | None:
    if name not in given:
        return None
    found = _whole(name, given[name], "a number")
    if found < 1:
        raise bad_option(name, f"{found}: a whole number from 1 up")
    return found


def _whole(name: str, text: str, what: str) -> int:
    if not text.isdecimal() or len(text) > 18:
        raise bad_option(name, f"{text!r}: {what}, in digits")
    return int(text)


def _flag(given: Mapping[str, str], name: str, otherwise: bool) -> bool:
    return _choice(given, name, {"true": True, "false": False}, otherwise)


def _choice(given: Mapping[str, str], name: str, choices: Mapping[str, T], otherwise: T) -> T:
    if name not in given:
        return otherwise
    found = choices.get(given[name].lower())
    if found is None:
        raise bad_option(name, f"{given[name]!r}: choose {' or '.join(choices)}")
    return found


def _json(name: str, text: str, example: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise bad_option(name, f"{text!r}: write {example}")
    return found
