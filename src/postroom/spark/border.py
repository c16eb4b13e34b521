"""The border to Spark's Python processes: an error of ours crosses it as one sentence.

Spark sends the text of an error to Java, and a user finds it in the message of another one. A traceback would
come before the sentence, and there is nothing in it that helps. So it is left out, in the way that Spark has
for it; the process ends with the error, so that no other one loses its traceback. Errors that are none of
ours keep theirs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FunctionType, GeneratorType
from typing import Any, TypeVar

from ..errors import PostroomError

__all__ = ["one_sentence"]

C = TypeVar("C", bound=type)

_HIDE = "SPARK_HIDE_TRACEBACK"


def one_sentence(spark_calls: C) -> C:
    """A class with methods that Spark calls: whatever of ours they raise has no traceback."""
    for name, found in list(vars(spark_calls).items()):
        if isinstance(found, FunctionType) and (name == "__init__" or not name.startswith("_")):
            setattr(spark_calls, name, _crossing(found))
    return spark_calls


def _crossing(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        with _cut():
            found = method(*args, **kwargs)
        return _each(found) if isinstance(found, GeneratorType) else found

    return called


def _each(rows: Iterator[Any]) -> Iterator[Any]:
    with _cut():
        yield from rows


@contextmanager
def _cut() -> Iterator[None]:
    try:
        yield
    except PostroomError:
        if _in_spark():
            os.environ[_HIDE] = "1"
        raise


def _in_spark() -> bool:
    """In a process that Spark has started, and not in one that uses these classes itself."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec is not None and spec.name.startswith("pyspark.")
