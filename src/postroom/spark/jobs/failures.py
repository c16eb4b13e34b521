"""What Spark raises, as errors of Postroom.

An error of ours that was raised in a task, or in a process of Spark's, comes back as text inside an error of
Spark's, with tracebacks around it. Here it becomes the same error again. An error of another kind in a Python
process keeps the line that says what it was, and what is Spark's own its first. Must never show more: there
may be options in the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from socket import gethostname

from ... import errors, sync
from ...address import parse
from ...errors import PostroomError
from ..options import bad_option, reach_options

__all__ = ["connected", "explained", "found_in"]


_OURS = re.compile(r"postroom\.errors\.([A-Za-z]+): (.+)")
_TRACEBACK = "Traceback (most recent call last):"
_RAISED = re.compile(
    r"^([A-Za-z_][\w.]*)(: .+)?$", re.MULTILINE
)  # what is behind the frames, which are indented
_LOGIN = re.compile(r"://[^/\s@]*@")
_LONGEST = 600


@contextmanager
def explained() -> Iterator[None]:
    """`with explained(): query.awaitTermination()`: whatever Spark raises in there is an error of Postroom,
    in one sentence, with Spark's as its cause."""
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
    first = _raised_in_python(text) or next(
        filter(None, map(str.strip, text.splitlines())), "it did not say why"
    )
    return PostroomError(
        f"Spark failed: {_sentence(_LOGIN.sub('://…@', first))} (the cause of this error has all of it; "
        "--debug shows it)"
    )


def _raised_in_python(text: str) -> str | None:
    """The error at the end of the last traceback: those before it led to it."""
    _, found, rest = text.rpartition(_TRACEBACK)
    raised = _RAISED.search(rest) if found else None
    return raised[0] if raised else None


def _sentence(text: str) -> str:
    text = text.strip().removesuffix("\\n")
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def connected(queue: Mapping[str, str]) -> sync.Connection:
    """Connect to a queue as jobs use it on the driver: without asyncio, from the data source's options."""
    reach = reach_options(queue)
    path = parse(reach.url).path
    if path is not None and not path.exists():  # to connect would make it
        raise bad_option("url", f"there is no file {path} on this machine, {gethostname()}")
    tls = {"true": True, "false": None}.get((reach.tls or "false").lower(), reach.tls)
    return sync.connect(reach.url, token=reach.token, tls=tls, shards=dict(reach.shards) or None)
