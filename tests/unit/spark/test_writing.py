"""Writers without a JVM: options, columns, and a driver that is cut off, sent back and run again (I20)."""

from __future__ import annotations

import itertools
import pickle
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pa = pytest.importorskip("pyarrow")
types = pytest.importorskip("pyspark.sql.types")

import postroom.sync  # noqa: E402
from postroom.errors import (  # noqa: E402
    InvalidMessage,
    InvalidSetting,
    StagingConflict,
    UnknownTopic,
    UsageError,
)
from postroom.model.moves.staging import differ, joined, of_messages  # noqa: E402
from postroom.spark.columns import HEADERS  # noqa: E402
from postroom.spark.writing import (  # noqa: E402
    BatchWriter,
    Columns,
    Part,
    StreamWriter,
    content_of,
    shape_of,
    write_options,
)

SOURCED = "key binary, value string, source_partition int, source_offset bigint"


def schema(text: str) -> Any:
    """A struct of simple columns, as `createDataFrame` would read it, without a JVM."""
    simple = {"binary": types.BinaryType(), "string": types.StringType(), "int": types.IntegerType(),
              "bigint": types.LongType(), "double": types.DoubleType()}  # fmt: skip
    pair = types.StructType(
        [types.StructField("key", simple["string"]), types.StructField("value", simple["binary"])]
    )
    simple[HEADERS] = types.ArrayType(pair)
    columns = [column.partition(" ")[::2] for column in text.split(", ")]
    return types.StructType([types.StructField(name, simple[kind]) for name, kind in columns])


# ---- options and columns ----


@pytest.mark.parametrize(
    ("columns", "topic", "named"),
    [
        ("key binary", "t", "column value"),
        ("value int", "t", "column value: it is binary or string"),
        ("value string, key bigint", "t", "column key: .*cast it"),
        ("value string, color string", "t", "column color"),
        ("value string, topic int", None, "column topic"),
        ("value string", None, "option topic"),
        ("value string, source_offset bigint", "t", "give both"),
        ("value string, source_partition double, source_offset int", "t", "column source_partition"),
        ("value string, headers string", "t", "column headers"),
    ],
)
def test_columns_that_are_wrong(columns: str, topic: str | None, named: str) -> None:
    with pytest.raises(InvalidSetting, match=named):
        shape_of(schema(columns), topic)


def test_columns_of_a_source_may_be_there() -> None:
    found = shape_of(schema("key binary, value binary, topic string, partition int, offset bigint"), "t")
    assert (found.topic, found.has_key, found.has_source) == ("t", True, False)


@pytest.mark.parametrize(
    ("options", "streaming", "named"),
    [
        ({}, False, "option url"),
        ({"tpic": "t"}, False, "did you mean topic"),
        ({"path": "/x"}, False, "option path"),
        ({"batch": "1"}, False, "option batch"),
        ({"query": "q", "batch": "x"}, False, "option batch"),
        ({"query": "q"}, True, "option query"),
        ({"failOnOtherContent": "false"}, True, "option failOnOtherContent"),
        ({"failOnOtherContent": "false"}, False, "option failOnOtherContent"),
        ({"query": "q", "failOnOtherContent": "no"}, False, "option failOnOtherContent: true or false"),
        ({"topic": "a b"}, True, "topic"),
        ({"query": "x" * 121}, False, "query="),
    ],
)
def test_options_that_are_wrong(options: dict[str, str], streaming: bool, named: str) -> None:
    url = {} if named == "option url" else {"url": "sqlite:////tmp/q.db"}
    with pytest.raises(postroom.PostroomError, match=named):
        write_options({**url, **options}, streaming=streaming)


def test_a_topic_is_not_overwritten() -> None:
    options = write_options({"url": "sqlite:////tmp/q.db", "topic": "t"}, streaming=True)
    for kind in (BatchWriter, StreamWriter):
        with pytest.raises(InvalidSetting, match="not overwritten"):
            kind(options, schema("value string"), True)
    assert "sqlite" not in repr(options)
    with pytest.raises(UsageError, match="is it a stream"):
        StreamWriter(options, schema("value string"), False).write(iter(()))


def columns(text: str, option: str | None = "t", /, **data: list[Any]) -> Columns:
    return Columns(shape_of(schema(text), option), pa.RecordBatch.from_pydict(data))


def test_rows_at_or_below_the_marks_are_left_out() -> None:
    offsets, places = [5, 6, 7, 1, 2, 9], [0, 0, 0, 1, 1, 2]
    rows = columns(
        SOURCED, key=[b"k"] * 6, value=list("abcdef"), source_partition=places, source_offset=offsets
    )
    source = rows.source()
    assert source == {"0": (5, 7), "1": (1, 2), "2": (9, 9)}
    for marks, left in (
        ({}, "abcdef"),
        ({"0": 4}, "abcdef"),
        ({"0": 6, "2": 9}, "cde"),
        ({"0": 7, "1": 1}, "ef"),
    ):
        [part] = rows.above(marks, source).parts()
        assert b"".join(part.values).decode() == left
    assert list(rows.above({"0": 9, "1": 9, "2": 9}, source).parts()) == []


def test_rows_by_topic() -> None:
    text = f"topic string, key string, value binary, headers {HEADERS}"
    pairs = [[{"key": "h", "value": b"1"}], None, []]
    rows = columns(
        text, None, topic=["b", "a", "b"], key=["x", None, "z"], value=[b"1", b"2", b"3"], headers=pairs
    )
    found = {part.topic: part for part in rows.parts()}
    assert (found["b"].keys, found["b"].values, found["a"].keys) == ([b"x", b"z"], [b"1", b"3"], [None])
    assert (found["b"].headers, found["a"].headers) == ([[("h", b"1")], []], [[]])


def test_values_that_are_wrong() -> None:
    with pytest.raises(InvalidMessage, match="null in 1 rows"):
        list(columns("value string", value=["a", None]).parts())
    with pytest.raises(InvalidMessage, match="column topic"):
        list(columns("topic string, value string", None, topic=["a", None], value=["a", "b"]).parts())
    with pytest.raises(InvalidMessage, match="both columns"):
        columns(SOURCED, key=[b"k"], value=["a"], source_partition=[None], source_offset=[1]).source()
    reserved = [[{"key": "postroom-id", "value": b"1"}]]
    with pytest.raises(InvalidMessage, match="reserved"):
        list(columns(f"value string, headers {HEADERS}", value=["a"], headers=reserved).parts())


# ---- a driver without Spark ----


@contextmanager
def task(query: str, batch: int, partition: int, attempt: int = 0) -> Iterator[None]:
    context = mock.Mock()
    context.partitionId.return_value, context.attemptNumber.return_value = partition, attempt
    given: Mapping[str, str] = {"sql.streaming.queryId": query, "streaming.sql.batchId": str(batch)}
    context.getLocalProperty.side_effect = given.get
    with mock.patch("postroom.spark.writing.TaskContext.get", return_value=context):
        yield


def travelled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


class Driver:
    """What Spark does: a log of offsets before a batch, a log of commits behind it."""

    def __init__(self, url: str) -> None:
        self.writer = StreamWriter(
            write_options({"url": url, "topic": "out"}, streaming=True), schema(SOURCED), False
        )
        self.ends = [0]  # of batches, as the checkpoint has them

    def batch(self, size: int, fate: str) -> None:
        """The next batch has `size` rows; two tasks, one of which is tried twice."""
        number, first = len(self.ends) - 1, self.ends[-1]
        messages = [self.stage(number, range(first, first + size), task, 0) for task in (0, 1)]
        self.stage(number, range(first, first + size), 1, 1)
        if fate == "staged":
            return
        if fate == "aborted":
            travelled(self.writer).abort(messages, number)
            return
        travelled(self.writer).commit(messages, number)
        if fate == "done":
            self.ends.append(first + size)

    def stage(self, number: int, rows: range, place: int, attempt: int) -> Any:
        mine = list(rows)[place::2]
        arrow = pa.RecordBatch.from_pydict(
            {
                "key": [b"%d" % (n % 5) for n in mine],
                "value": [str(n) for n in mine],
                "source_partition": pa.array([0] * len(mine), pa.int32()),
                "source_offset": pa.array(mine, pa.int64()),
            }
        )
        with task("q", number, place, attempt):
            return travelled(travelled(self.writer).write(iter([arrow.slice(0, 3), arrow.slice(3)])))


FATES = st.sampled_from(["done", "done", "lost", "staged", "aborted", "back"])


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(FATES, st.integers(1, 9)), min_size=1, max_size=6), st.integers(0, 2**32))
def test_whatever_becomes_of_batches_every_row_is_there_once(
    tmp_path: Path, turns: list[tuple[str, int]], name: int
) -> None:
    url = f"sqlite:///{tmp_path}/{name}-{len(list(tmp_path.iterdir()))}.db"
    with postroom.sync.connect(url) as mq:
        mq.create_topic("out", partitions=2)
        driver = Driver(url)
        for fate, size in turns:
            if fate == "back":
                del driver.ends[max(1, len(driver.ends) - 1) :]
            else:
                driver.batch(size, fate)
        driver.batch(50, "done")
        found = [int(message.value) for message in mq.read("out")]
        assert sorted(found) == list(range(driver.ends[-1]))
        for key in range(5):
            mine = [n for n in found if n % 5 == key]
            for part in (0, 1):
                assert [n for n in mine if n % 2 == part] == sorted(n for n in mine if n % 2 == part)


ROWS = st.lists(
    st.tuples(
        st.none() | st.binary(max_size=3),
        st.binary(max_size=9),
        st.lists(st.tuples(st.sampled_from("ab"), st.none() | st.binary(max_size=2)), max_size=2),
    ),
    min_size=1,
)


def contents(rows: list[Any], *ends: int, topic: str = "t") -> tuple[bytes, bytes]:
    """As Spark's writer and as the SDK have them, of rows that several tasks have."""
    cuts = itertools.pairwise((0, *sorted(min(end, len(rows)) for end in ends), len(rows)))
    parts = [rows[first:end] for first, end in cuts if first < end]
    columns = [Part(topic, [r[0] for r in p], [r[1] for r in p], [r[2] for r in p]) for p in parts]
    return joined(content_of([c]) for c in columns), joined(of_messages(topic, p) for p in parts)


@settings(max_examples=60, deadline=None)
@given(ROWS, st.randoms(use_true_random=False), st.lists(st.integers(0, 9), max_size=3), ROWS)
def test_content_is_that_of_the_rows_however_they_are_spread(
    rows: list[Any], random: Random, ends: list[int], others: list[Any]
) -> None:
    shuffled = random.sample(rows, len(rows))
    assert contents(rows) == contents(shuffled, *ends)
    same = Counter(map(repr, rows)) == Counter(map(repr, others))
    assert [one == other for one, other in zip(contents(rows), contents(others), strict=True)] == [same, same]
    assert all(differ(a, b) for a, b in zip(contents(rows), contents(rows, topic="u"), strict=True))
    assert all(differ(a, b) for a, b in zip(contents(rows), contents([*rows, rows[0]]), strict=True))


def test_a_column_of_nothing_is_as_none_and_a_key_is_not_a_value() -> None:
    bare, empty = Part("t", None, [b"a"], None), Part("t", [None], [b"a"], [[]])
    assert content_of([bare]) == content_of([empty])
    apart = [content_of([Part("t", [key], [value], None)]) for key, value in ((b"a", b"b"), (b"b", b"a"))]
    assert differ(*apart) and differ(content_of([bare]), content_of([Part("t", [b"None"], [b"a"], None)]))
    crossed = [Part("t", [b"1", b"2"], values, None) for values in ([b"a", b"b"], [b"b", b"a"])]
    assert differ(*(content_of([part]) for part in crossed))


def test_a_named_batch_with_other_content_is_refused(tmp_path: Path) -> None:
    """Unless it may be: then what was published first counts."""
    url = f"sqlite:///{tmp_path}/q.db"

    def write(values: list[str], *cuts: int, **more: str) -> None:
        options = write_options({"url": url, "topic": "out", "query": "nightly", **more}, streaming=False)
        writer = BatchWriter(options, schema("value string"), False)
        rows = pa.RecordBatch.from_pydict({"value": values})
        parts = [rows.slice(a, b - a) for a, b in itertools.pairwise((0, *cuts, len(values)))]
        travelled(writer).commit([travelled(travelled(writer).write(iter([part]))) for part in parts])

    with postroom.sync.connect(url) as mq:
        mq.create_topic("out", partitions=2)
        write(["a", "b", "c"], 2)
        write(["c", "a", "b"], 1)  # the same rows, spread otherwise
        with pytest.raises(StagingConflict, match=r"3 rows.*other content.*failOnOtherContent=false"):
            write(["a", "b", "x"])
        write(["a", "b", "x"], failOnOtherContent="false")
        write(["a", "b", "x"], batch="1")
        assert sorted(m.value for m in mq.read("out")) == [b"a", b"a", b"b", b"b", b"c", b"x"]


def test_a_stream_that_makes_other_rows_when_it_repeats_a_batch_goes_on(tmp_path: Path) -> None:
    """With rand() or current_timestamp(), say: Spark repeats what it has not noted down as done."""
    url = f"sqlite:///{tmp_path}/q.db"
    with postroom.sync.connect(url) as mq:
        mq.create_topic("out", partitions=1)
        options = write_options({"url": url, "topic": "out"}, streaming=True)
        writer = StreamWriter(options, schema("value string"), False)
        for number, values in ((0, ["a", "b"]), (0, ["c", "d"]), (1, ["e"])):
            with task("q", number, 0):
                message = writer.write(iter([pa.RecordBatch.from_pydict({"value": values})]))
            writer.commit([message], number)
        assert [m.value for m in mq.read("out")] == [b"a", b"b", b"e"]


def test_a_batch_writer_that_travels(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/q.db"
    with postroom.sync.connect(url) as mq:
        mq.create_topic("out", partitions=2)
        options = write_options({"url": url, "topic": "out"}, streaming=False)
        writer = BatchWriter(options, schema("value string"), False)
        rows = pa.RecordBatch.from_pydict({"value": ["a", "b"]})
        message = travelled(travelled(writer).write(iter([rows, rows])))
        assert list(mq.read("out")) == []
        for _ in range(2):
            travelled(writer).commit([message, None])
        assert sorted(m.value for m in mq.read("out")) == [b"a", b"a", b"b", b"b"]
        nowhere = write_options({"url": url, "topic": "nowhere"}, streaming=False)
        with pytest.raises(UnknownTopic):
            BatchWriter(nowhere, schema("value string"), False).write(iter([rows]))
        travelled(writer).abort([None])
