"""Handlers in a Django project: their database connections are looked after as those of requests are.

Before and after each handler, connections that are broken or older than CONN_MAX_AGE are closed, in the
thread that its queries run in: its own, if it is a plain function; else Django's thread for async code. A
connection inside `atomic` is left alone. Must never close a connection that a handler still uses.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

from asgiref.sync import sync_to_async
from django.db import close_old_connections, reset_queries

from ...client.app.app import App as _App
from ...client.app.call import middleware_of
from .using import address

__all__ = ["App", "around_handlers"]


class App(_App):
    """A `postroom.App` at POSTROOM_URL; options that are given win over POSTROOM_OPTIONS."""

    def __init__(self, **options: Any) -> None:
        url, common = address()
        super().__init__(url, **(common | options))
        around_handlers(self)


def around_handlers(app: _App) -> None:
    """Give any app of Postroom the middleware for Django's connections; once more is harmless."""
    mine = [replace(middleware_of(one), own_kind=True) for one in (_in_thread, _in_loop)]
    known = {layer.name for layer in app._middleware}
    app._middleware[:0] = [layer for layer in mine if layer.name not in known]


def _in_thread(message: Any) -> Iterator[None]:
    _begin()
    try:
        yield
    finally:
        close_old_connections()


async def _in_loop(message: Any) -> AsyncIterator[None]:
    await sync_to_async(_begin)()
    try:
        yield
    finally:
        await sync_to_async(close_old_connections)()


def _begin() -> None:
    reset_queries()  # with DEBUG they are kept, and a worker lives long
    close_old_connections()
