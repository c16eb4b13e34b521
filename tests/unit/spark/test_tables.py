"""Which options of a SQL table count for a query."""

from __future__ import annotations

import pytest

from postroom.errors import InvalidSetting, UsageError
from postroom.spark.source import Kind, asked, of_query

TABLE = {
    "jar": "table",
    "option.url": "postroom://h:7070",
    "option.token": "pst_x",
    "option.subscribe": "orders",
    "option.startingOffsets": "earliest",
    "option.endingOffsets": "latest",
    "option.maxOffsetsPerTrigger": "7",
    "option.failOnDataLoss": "false",
}
REACH = {"url": "postroom://h:7070", "token": "pst_x"}
READ = {**REACH, "subscribe": "orders", "startingoffsets": "earliest", "failondataloss": "false"}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("batch", {**READ, "endingoffsets": "latest"}),
        ("stream", {**READ, "maxoffsetspertrigger": "7"}),
        ("write", {**REACH, "topic": "orders"}),
    ],
)
def test_those_that_fit_count(kind: Kind, options: dict[str, str]) -> None:
    assert of_query(TABLE, kind) == options


def test_those_of_the_query_count_more() -> None:
    given = {**TABLE, "startingTimestamp": "5", "endingTimestamp": "9", "failOnDataLoss": "true"}
    assert of_query(given, "batch") == {
        **{name: READ[name] for name in ("url", "token", "subscribe")},
        "startingtimestamp": "5",
        "endingtimestamp": "9",
        "failondataloss": "true",
    }
    strategy = {"startingOffsetsByTimestampStrategy": "latest"}
    assert of_query({**TABLE, **strategy}, "batch")["startingoffsets"] == "earliest"


def test_a_topic_is_read_and_written_and_several_are_read() -> None:
    topic = {"jar": "table", "option.url": "u", "option.url.b": "v", "option.topic": "orders"}
    assert of_query(topic, "batch") == {"url": "u", "url.b": "v", "subscribe": "orders"}
    assert of_query(topic, "write") == {"url": "u", "url.b": "v", "topic": "orders"}
    several = {"jar": "table", "option.url": "u", "option.subscribe": "a,b"}
    assert of_query(several, "write") == {"url": "u"}


def test_other_options_are_left_alone() -> None:
    given = {"url": "u", "Subscribe": "t"}
    assert asked(given) is None
    assert of_query(given, "batch") == given


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"url": "u", "option.url": "u", "provider": "postroom"}, "does not keep the OPTIONS of a table"),
        ({}, r"not even url\. Is this a table\?"),
    ],
)
def test_without_the_jar(options: dict[str, str], text: str) -> None:
    with pytest.raises(UsageError, match=text) as error:
        of_query(options, "batch")
    assert "--jars $(python -m postroom.spark.jar)" in str(error.value)
    assert "CREATE TEMPORARY VIEW" in str(error.value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"option.subscrib": "t"}, "no option subscrib: did you mean subscribe"),
        ({"jar": "x"}, "no option jar"),
        ({"includeHeaders": "true"}, "option includeheaders: the table has it"),
        ({"subscribe": "other"}, "option subscribe: the table has it"),
    ],
)
def test_refused(options: dict[str, str], text: str) -> None:
    with pytest.raises(InvalidSetting, match=text):
        of_query({**TABLE, **options}, "batch")
