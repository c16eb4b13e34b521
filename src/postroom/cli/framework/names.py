"""Names for the shell to complete: topics, groups and shards, as the queue has them (`postroom lag <TAB>`).

A queue in a file is read without the SDK, and never made, locked or written. Any other is asked through the
SDK, and only for a moment: whoever pressed a key waits for it. Must be silent: whatever is wrong, there is
nothing to complete and not a word, since the shell would write it into somebody's command.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from postroom import Connection

__all__ = ["groups", "shards", "topics"]

_MOST = 1000  # names: a shell shows no more in any useful way
_TOPICS = "SELECT name FROM postroom_topics ORDER BY name"
_GROUPS = """SELECT g.name FROM postroom_groups g JOIN postroom_topics t ON t.id = g.topic_id
             WHERE t.name = ? ORDER BY g.name"""
_SHARDS = "SELECT name FROM postroom_shards ORDER BY name"


def topics(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the topics that begin so; groups' own and Postroom's if no other does."""

    async def asked(mq: Connection) -> list[str]:
        return [info.name for info in await mq.topics(internal=True)]

    begun = [name for name in _found(ctx, _TOPICS, (), asked) if name.startswith(incomplete)]
    return [name for name in begun if _is_users(name)] or begun


def groups(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the groups of the topic before it that begin so."""
    topic = ctx.params.get("topic")
    if not isinstance(topic, str):
        return []

    async def asked(mq: Connection) -> list[str]:
        return [info.name for info in await mq.groups(topic)]

    return [name for name in _found(ctx, _GROUPS, (topic,), asked) if name.startswith(incomplete)]


def shards(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the shards that begin so."""

    async def asked(mq: Connection) -> list[str]:
        return [info.name for info in await mq.shards()]

    found = dict.fromkeys(["first", *_found(ctx, _SHARDS, (), asked)])
    return [name for name in found if name.startswith(incomplete)]


def _is_users(name: str) -> bool:
    return not name.startswith("_") and not name.endswith((".dead", ".retry", ".slow"))


# ---- the queue ----

_Ask = Callable[["Connection"], Any]


def _found(ctx: typer.Context, sql: str, values: tuple[str, ...], asked: _Ask) -> list[str]:
    try:
        from ...address import parse

        url = next((one["url"] for one in _given(ctx) if one.get("url")), None)
        address = parse(url or os.environ.get("POSTROOM_URL") or "sqlite:///postroom.db")
        if address.kind == "memory":
            return []
        if address.path is not None:
            return _in_file(address.path, sql, values)
        return _asked_soon(str(url or os.environ["POSTROOM_URL"]), asked)
    except Exception:  # a shell that completes is no place for an error
        return []


def _given(ctx: Any) -> Iterator[Mapping[str, Any]]:
    """Yield what was typed so far, of the command and of those above it."""
    while ctx is not None:
        yield ctx.params
        ctx = ctx.parent


def _in_file(path: Path, sql: str, values: tuple[str, ...]) -> list[str]:
    import sqlite3
    from contextlib import closing

    if not path.is_file():
        return []
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=0)) as file:
        return [str(name) for (name,) in file.execute(sql, values).fetchmany(_MOST)]


def _asked_soon(url: str, asked: _Ask) -> list[str]:
    """Ask in a thread; if there is no answer soon, leave at once: nothing under way could be harmed."""
    import asyncio
    import logging
    import threading

    from ...config import DEFAULTS

    logging.disable(logging.CRITICAL)
    found: list[str] = []

    async def ask() -> None:
        import postroom

        async with postroom.connect(url) as mq:
            found.extend((await asked(mq))[:_MOST])

    def run() -> None:
        try:
            asyncio.run(ask())
        except Exception:
            found.clear()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(DEFAULTS.tuning.cli.complete_s)
    if thread.is_alive() and not found:
        sys.stdout.flush()
        os._exit(0)
    return list(found)
