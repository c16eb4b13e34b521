"""Errors on their way through Spark, and what is made of them on the other side."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import pytest
from pyspark.errors import PySparkException

import postroom.spark
from postroom.errors import DataLoss, InvalidSetting, PostroomError
from postroom.spark.compat import one_sentence
from postroom.spark.jobs.failures import found_in

HIDE = "SPARK_HIDE_TRACEBACK"
WORKER = """\
Job aborted due to stage failure: Task 0 in stage 1.0 failed 1 times
An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "a.py", line 1, in f
    raise KeyError("x")
KeyError: 'x'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "a.py", line 3, in f
    connect("postgresql://me:secret@db/x")
{}

	at org.apache.spark.api.python.BasePythonRunner.handlePythonException(PythonRunner.scala:1)
Caused by: java.lang.RuntimeException: no
"""


@one_sentence
class Called:
    """As Spark calls it: a constructor, a method, rows one by one."""

    def __init__(self, wrong: bool = False) -> None:
        if wrong:
            raise InvalidSetting("no")

    def answer(self, error: Exception | None = None) -> int:
        if error is not None:
            raise error
        return 42

    def rows(self) -> Iterator[int]:
        yield 1
        raise DataLoss("gone")


@pytest.fixture
def in_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HIDE, raising=False)
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__spec__=ModuleSpec("pyspark.daemon", None)))


@pytest.mark.usefixtures("in_spark")
def test_an_error_of_ours_crosses_without_a_traceback() -> None:
    assert Called().answer() == 42 and HIDE not in os.environ
    with pytest.raises(InvalidSetting):
        Called(wrong=True)
    assert os.environ.pop(HIDE)
    with pytest.raises(DataLoss):
        Called().answer(DataLoss("gone"))
    assert os.environ.pop(HIDE)
    rows = Called().rows()
    assert next(rows) == 1 and HIDE not in os.environ
    with pytest.raises(DataLoss):
        next(rows)
    assert os.environ.pop(HIDE)


@pytest.mark.usefixtures("in_spark")
def test_any_other_keeps_its_own() -> None:
    with pytest.raises(ValueError, match="odd"):
        Called().answer(ValueError("odd"))
    assert HIDE not in os.environ


def test_a_process_of_somebody_else_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HIDE, raising=False)
    with pytest.raises(DataLoss):
        Called().answer(DataLoss("gone"))
    assert HIDE not in os.environ


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        (WORKER.format("postroom.errors.DataLoss: gone. Do this"), DataLoss, "gone. Do this"),
        (
            WORKER.format("ValueError: date value out of range"),
            PostroomError,
            "Spark failed: ValueError: date",
        ),
        (WORKER.format("MemoryError"), PostroomError, "Spark failed: MemoryError (the cause"),
        (
            WORKER.format("x.OperationalError: postgresql://me:secret@db/x"),
            PostroomError,
            "postgresql://…@db/x",
        ),
        (
            "\n[TABLE_OR_VIEW_NOT_FOUND] no\nmore",
            PostroomError,
            "Spark failed: [TABLE_OR_VIEW_NOT_FOUND] no (the",
        ),
        ("", PostroomError, "Spark failed: it did not say why"),
    ],
)
def test_what_is_found_in_spark_s(text: str, kind: type[PostroomError], said: str) -> None:
    found = found_in(text)
    assert type(found) is kind
    assert said in str(found) and "secret" not in str(found) and "\n" not in str(found)


def test_explained() -> None:
    with pytest.raises(DataLoss, match=r"^gone$") as error, postroom.spark.explained():
        raise PySparkException("[X] Failed: postroom.errors.DataLoss: gone\n SQLSTATE: 38000")
    assert isinstance(error.value.__cause__, PySparkException)
    with pytest.raises(ZeroDivisionError), postroom.spark.explained():
        raise ZeroDivisionError
