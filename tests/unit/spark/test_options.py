"""Options: what each means, and what is refused, by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from postroom.errors import InvalidSetting, InvalidURL, PostroomError
from postroom.spark.options import Position, Topics, reach_options, read_options

TOKEN = "pst_secret"
BASE = {"url": "postroom://h:7070", "subscribe": "t"}


def test_what_is_left_out() -> None:
    batch, stream = read_options(BASE, streaming=False), read_options(BASE, streaming=True)
    assert (batch.start.kind, batch.end.kind, stream.start.kind) == ("earliest", "latest", "latest")
    assert batch.topics == Topics(names=("t",))
    assert batch.fail_on_data_loss and not batch.headers


def test_names_are_the_same_in_any_case() -> None:
    found = read_options(
        {
            "URL": "postroom://h",
            "SUBSCRIBE": "a, b,a",
            "maxoffsetspertrigger": "7",
            "failondataloss": "FALSE",
        },
        streaming=True,
    )
    assert (found.topics.names, found.max_offsets, found.fail_on_data_loss) == (("a", "b"), 7, False)


def test_where_it_begins_and_ends() -> None:
    def position(**given: str) -> Position:
        return read_options({**BASE, **given}, streaming=False).start

    assert position(startingOffsets="earliest").kind == "earliest"
    assert position(startingOffsets='{"t": {"0": 3, "1": -2}}').at == {("t", 0): 3, ("t", 1): -2}
    assert position(startingOffsets='{"v": 1, "topics": {"t": {"0": 3}}, "ids": {"t": 1}}').at == {
        ("t", 0): 3
    }
    assert position(startingTimestamp="1700000000000") == Position("startingTimestamp", "time", 1700000000000)
    assert position(startingOffsetsByTimestamp='{"t": {"0": 5}}').kind == "times"
    end = read_options({**BASE, "endingOffsets": '{"t": {"0": -1}}'}, streaming=False).end
    assert end.at == {("t", 0): -1}


def test_delays() -> None:
    given = {**BASE, "minOffsetsPerTrigger": "5"}
    assert read_options(given, streaming=True).max_delay_ms == 900_000
    assert read_options({**given, "maxTriggerDelay": "10s"}, streaming=True).max_delay_ms == 10_000
    assert read_options({**given, "maxTriggerDelay": "250"}, streaming=True).max_delay_ms == 250


def test_assigned_partitions() -> None:
    found = read_options({"url": "postroom://h", "assign": '{"t": [0, 2]}'}, streaming=True)
    assert found.topics.partitions == {("t", 0), ("t", 2)}


def test_patterns() -> None:
    topics = read_options({"url": "postroom://h", "subscribePattern": "o.*"}, streaming=True).topics
    assert topics.takes("orders") and not topics.takes("no")


def test_a_file_is_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert reach_options({"url": "sqlite:///q.db"}).url == f"sqlite:///{tmp_path}/q.db"


def test_shards() -> None:
    given = {"url": "sqlite:////a.db", "url.B": "mysql://u:pw@h/d", "topic": "not looked at"}
    assert reach_options(given).shards == (("b", "mysql://u:pw@h/d"),)


STREAM, BATCH = True, False


@pytest.mark.parametrize(
    ("streaming", "given", "text"),
    [
        (BATCH, {"subscrib": "t"}, "no option subscrib: did you mean subscribe"),
        (BATCH, {"zzz": "t"}, "no option zzz: there are url, token"),
        (BATCH, {"path": "x"}, r"load\(\) takes no path"),
        (BATCH, {"topic": "x"}, "option topic is for writing"),
        (BATCH, {"kafka.bootstrap.servers": "x"}, "with the option url"),
        (BATCH, {"subscribe": "t", "assign": '{"t": [0]}'}, "option subscribe: it contradicts assign"),
        (BATCH, {"subscribe": ""}, "option subscribe: it names no topic"),
        (BATCH, {"subscribe": "a b"}, "option subscribe"),
        (BATCH, {"startingOffsets": "latest"}, "option startingOffsets: a batch read begins before the end"),
        (
            BATCH,
            {"startingOffsets": '{"t": {"0": -1}}'},
            "option startingOffsets: a batch read begins before",
        ),
        (BATCH, {"endingOffsets": "earliest"}, "option endingOffsets: a batch read ends behind its start"),
        (BATCH, {"startingOffsets": "soon"}, "option startingOffsets: 'soon': write earliest, latest or"),
        (BATCH, {"startingOffsets": '{"t": {"0": -3}}'}, "is not as in"),
        (BATCH, {"startingOffsets": '{"t": {"x": 3}}'}, "is not as in"),
        (BATCH, {"startingOffsets": '{"t": 3}'}, "of each topic"),
        (BATCH, {"startingOffsets": "{}"}, "names no partition"),
        (BATCH, {"startingOffsets": '{"u": {"0": 3}}'}, "names 'u' partition 0, which is not read: 't' is"),
        (BATCH, {"startingTimestamp": "now"}, "option startingTimestamp: 'now': milliseconds since 1970"),
        (BATCH, {"startingTimestamp": "1", "startingOffsets": "earliest"}, "contradicts startingTimestamp"),
        (BATCH, {"startingOffsetsByTimestampStrategy": "x"}, "choose error or latest"),
        (BATCH, {"maxOffsetsPerTrigger": "5"}, r"option maxOffsetsPerTrigger: it is for streams"),
        (BATCH, {"group": "g"}, "option group: it is for streams"),
        (STREAM, {"endingOffsets": "latest"}, "option endingOffsets: it is for batch reads"),
        (
            BATCH,
            {"pushFilters": "true"},
            "conditions are not pushed down.*with startingOffsets",
        ),
        (STREAM, {"maxOffsetsPerTrigger": "0"}, "whole number from 1 up"),
        (STREAM, {"maxOffsetsPerTrigger": "-5"}, "in digits"),
        (STREAM, {"maxOffsetsPerTrigger": "5", "minOffsetsPerTrigger": "6"}, "6 is more than maxOffsetsPer"),
        (STREAM, {"maxTriggerDelay": "5s"}, "it goes with minOffsetsPerTrigger"),
        (STREAM, {"unreachableTimeout": "soon"}, "option unreachableTimeout"),
        (STREAM, {"unreachableTimeout": "10ms"}, "option unreachableTimeout: '10ms': from 1s to 1d"),
        (BATCH, {"includeSource": "yes"}, "option includeSource: 'yes': choose true or false"),
        (STREAM, {"minOffsetsPerTrigger": "5", "maxTriggerDelay": "soon"}, "option maxTriggerDelay"),
        (STREAM, {"failOnDataLoss": "maybe"}, "choose true or false"),
        (STREAM, {"group": "a.b"}, "option group"),
        (STREAM, {"subscribe": "", "assign": "[0]"}, "contradicts"),
    ],
)
def test_refused(streaming: bool, given: dict[str, str], text: str) -> None:
    with pytest.raises(PostroomError, match=text):
        read_options({**BASE, **given}, streaming=streaming)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"assign": '{"t": []}'}, "option assign: the partitions of 't' are numbers"),
        ({"assign": "[0]"}, "option assign"),
        ({"subscribePattern": "("}, "option subscribePattern: .* is no regular expression"),
        ({}, "option subscribe: it is missing"),
    ],
)
def test_refused_topics(given: dict[str, str], text: str) -> None:
    with pytest.raises(InvalidSetting, match=text):
        read_options({"url": "postroom://h", **given}, streaming=True)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "option url: it is missing"),
        ({"url": "memory://x"}, "option url: memory:// is seen by one process only"),
        ({"url": "sqlite:////a.db", "token": TOKEN}, "option token: it is for brokers"),
        ({"url": "sqlite:////a.db", "tls": "true"}, "option tls: it is for brokers"),
        ({"url": "postroom://h", "url.b": "mysql://h/d"}, "option url.b: the broker knows its shards"),
        ({"url": "sqlite:////a.db", "url.b c": "x"}, "option url.NAME"),
    ],
)
def test_refused_ways_to_the_queue(given: dict[str, str], text: str) -> None:
    with pytest.raises(InvalidSetting, match=text) as error:
        reach_options(given)
    assert TOKEN not in str(error.value)


def test_a_token_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes to the executors as an option does; a database has no use for it."""
    monkeypatch.setenv("POSTROOM_TOKEN", TOKEN)
    assert reach_options({"url": "postroom://h"}).token == TOKEN
    assert reach_options({"url": "postroom://h", "token": "pst_other"}).token == "pst_other"
    assert reach_options({"url": "sqlite:////a.db"}).token is None
    monkeypatch.setenv("POSTROOM_TOKEN", "")
    assert reach_options({"url": "postroom://h"}).token is None


def test_secrets_are_not_shown() -> None:
    found = read_options({**BASE, "token": TOKEN}, streaming=True)
    assert found.reach.token == TOKEN
    assert TOKEN not in repr(found)
    stored = reach_options({"url": "postgresql://u:hidden@h/d", "url.b": "mysql://u:hidden@h/d"})
    assert "hidden" not in repr(stored)
    with pytest.raises(InvalidURL) as error:
        reach_options({"url": f"postroom://{TOKEN}@h"})
    assert TOKEN not in str(error.value)
