"""What Spark raises, as errors of Postroom.

An error of ours that was raised in a task, or in a process of Spark's, comes back as text inside an error of
Spark's, with tracebacks around it. Here it becomes the same error again. What is Spark's own keeps its first
line, which is the one that says something. Must never show more: there may be options in the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from ... import errors
from ...errors import PostroomError

__all__ = ["explained", "found_in"]

_OURS = re.compile(r"postroom\.errors\.([A-Za-z]+): (.+)")
_LONGEST = 600


@contextmanager
def explained() -> Iterator[None]:
    """Whatever comes out of Spark in here is an error of Postroom, with Spark's as its cause."""
    try:
        yield
    except PostroomError:
        raise
    except ConnectionError as error:
        raise PostroomError(f"Spark has ended while the job was running ({error}): run it again") from error
    except Exception as error:
        if not type(error).__module__.startswith(("pyspark", "py4j")):
            raise
        raise found_in(str(error)) from error


def found_in(text: str) -> PostroomError:
    """The error of ours in it: the last one, which the others led to. Else what Spark says."""
    ours = [
        (kind, said)
        for name, said in _OURS.findall(text)
        if isinstance(kind := getattr(errors, name, None), type) and issubclass(kind, PostroomError)
    ]
    if ours:
        kind, said = ours[-1]
        return kind(_sentence(said))
    first = next((line.strip() for line in text.splitlines() if line.strip()), "it did not say why")
    return PostroomError(f"Spark failed: {_sentence(first)} (--debug shows all of it)")


def _sentence(text: str) -> str:
    text = text.strip().removesuffix("\\n")
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
