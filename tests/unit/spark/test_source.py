"""The data source as Spark finds it, without Spark running."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest
from pyspark import cloudpickle
from pyspark.sql.datasource import DataSourceReader
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import LongType, StructField, StructType

import pyspark_postroom
from postroom.errors import InvalidSetting, UsageError
from postroom.spark.source import PostroomSource

TOKEN = "pst_secret"
GIVEN = {"url": "postroom://h:7070", "token": TOKEN, "subscribe": "t"}
SCHEMA = StructType([StructField("offset", LongType())])


def test_it_is_found_by_its_name() -> None:
    assert pyspark_postroom.DefaultSource is PostroomSource
    assert PostroomSource.name() == "postroom"


def test_without_pyarrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match=r"needs pyarrow here: run `pip install '\.\[spark\]'`"):
        PostroomSource(GIVEN)


def test_the_token_is_not_shown() -> None:
    source = PostroomSource(GIVEN)
    for one in (source, source.reader(SCHEMA), source.streamReader(SCHEMA)):
        assert TOKEN not in repr(one) and TOKEN not in str(one)
    with pytest.raises(InvalidSetting) as error:
        PostroomSource({**GIVEN, "subscrib": "t"}).reader(SCHEMA)
    assert TOKEN not in str(error.value)


def test_columns() -> None:
    assert "headers" not in PostroomSource(GIVEN).schema()
    assert PostroomSource({**GIVEN, "includeHeaders": "True"}).schema().endswith("value:binary>>")


def test_no_condition_is_taken() -> None:
    """Spark looks for the method, and refuses a reader that has it while the setting for it is off."""
    reader = PostroomSource(GIVEN).reader(SCHEMA)
    assert reader.pushFilters.__func__ is DataSourceReader.pushFilters


def test_a_stream_reader_can_be_sent_and_has_limits() -> None:
    reader = cloudpickle.loads(cloudpickle.dumps(PostroomSource(GIVEN).streamReader(SCHEMA)))
    assert isinstance(reader, SupportsTriggerAvailableNow)
    assert reader.getDefaultReadLimit() == ReadAllAvailable()
    limited = PostroomSource({**GIVEN, "maxOffsetsPerTrigger": "7"}).streamReader(SCHEMA)
    assert limited.getDefaultReadLimit() == ReadMaxRows(7)
    reader.stop()  # before anything was opened


def test_the_wheel_has_what_spark_looks_for() -> None:
    root = Path(__file__).resolve().parents[3]
    settings = tomllib.loads((root / "pyproject.toml").read_text())
    packed = settings["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert sorted(packed) == sorted(f"src/{init.parent.name}" for init in root.glob("src/*/__init__.py"))
    assert "src/pyspark_postroom" in packed
