"""Errors as they travel: a code for machines, a sentence for people, and what a program may want to read.

An error of our tree arrives as the same class. One that the other side does not know arrives as the nearest
thing it does: a `PostroomError` with its code in the details, and as retriable as it was. What is not of our
tree is a fault of the broker: it is logged there, and the client is told no more than that. Where a sentence
is for whoever runs the broker, its `_served` goes instead: a client is never told to do what it cannot.
"""

from __future__ import annotations

import logging
from typing import Any

from .. import errors
from ..errors import PostroomError
from .messages import Failure

__all__ = ["failure_of", "raised"]

_log = logging.getLogger("postroom.wire")

_CLASSES: dict[str, type[PostroomError]] = {
    found.code: found
    for found in vars(errors).values()
    if isinstance(found, type) and issubclass(found, PostroomError)
}
_PLAIN = (str, int, float, bool, bytes, type(None))


class _Foreign(PostroomError):
    """An error of a newer broker that may be tried again."""

    retriable = True


def failure_of(error: BaseException) -> Failure:
    if isinstance(error, PostroomError):
        details = {
            name: value
            for name, value in error.details.items()
            if not name.startswith("_") and _travels(value)
        }
        return Failure(error.code, error.details.get("_served") or str(error), error.retriable, details)
    _log.error("a request failed in an unexpected way", exc_info=error)
    return Failure("broker", f"the broker failed ({type(error).__name__}): look into its log")


def raised(failure: Failure) -> PostroomError:
    """The error to raise for it."""
    kind = _CLASSES.get(failure.code)
    found = (kind or (_Foreign if failure.retriable else PostroomError))(failure.message)
    found.details.update(failure.details)  # whatever their names are
    if kind is None:
        found.details.setdefault("code", failure.code)
    return found


def _travels(value: Any) -> bool:
    if isinstance(value, int):
        return -(2**63) <= value < 2**64
    if isinstance(value, list | tuple):
        return all(map(_travels, value))
    if isinstance(value, dict):
        return all(isinstance(k, str | int) and _travels(v) for k, v in value.items())
    return isinstance(value, _PLAIN)
