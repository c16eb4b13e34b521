"""`@outbox.transactional`: a function as one transaction, in one line.

Decides which connection that is: the first argument that is one, or one that a factory opens for the call.
Must never leave a connection open that it has opened.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

from ...errors import UsageError
from .. import databases
from .transactions import resolved

if TYPE_CHECKING:
    from .outbox import Outbox

__all__ = ["transactional"]


def transactional(outbox: Outbox, function: Callable[..., Any], connect: Any) -> Callable[..., Any]:
    """`connect`: opens a connection for each call, which becomes its first argument; None: it has one."""
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            if connect is None:
                async with outbox.transaction(_found(function, args, kwargs)):
                    return await function(*args, **kwargs)
            async with _opened_async(connect) as connection, outbox.transaction(connection):
                return await function(connection, *args, **kwargs)

        return call_async

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if connect is None:
            with outbox.transaction(_found(function, args, kwargs)):
                return function(*args, **kwargs)
        with _opened(connect) as connection, outbox.transaction(connection):
            return function(connection, *args, **kwargs)

    return call


def _found(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    for value in (*args, *kwargs.values()):
        if databases.library(value) and hasattr(value, "commit") and hasattr(value, "rollback"):
            return value  # an object that is mapped to a table is of the same library, and no connection
    raise UsageError(
        f"{function.__qualname__} was called without a connection or session: give it one, or let one be "
        "opened for each call with @outbox.transactional(connect=…)"
    )


@contextmanager
def _opened(connect: Any) -> Iterator[Any]:
    if isinstance(connect, str):  # Django opens and closes by itself
        yield resolved(connect)
        return
    connection = connect()
    try:
        yield connection
    finally:
        connection.close()


@asynccontextmanager
async def _opened_async(connect: Any) -> AsyncIterator[Any]:
    if isinstance(connect, str):
        yield resolved(connect)
        return
    connection = connect()
    if hasattr(connection, "__aexit__"):
        async with connection as started:
            yield started
        return
    try:
        yield connection
    finally:
        connection.close()
