"""Senders whose messages wait elsewhere first: in a spool's file, or in an outbox of their own database.

A message is confirmed once it is flushed there, and from then on must never be lost, nor be stored twice.
What the sender rolls back must never be sent: it is not noted, so whoever finds it finds a stranger.
"""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import postroom
from postroom import Outbox, Spool

from . import disk
from .plan import Sender
from .roles import TOPIC, Notes, Sending, connected, is_ready, passes
from .world import current_world, here

__all__ = ["own_database", "relay", "spool"]

_LEASE_S, _LOOK_S = 1.0, 0.2  # of a relay
_TABLE = "CREATE TABLE IF NOT EXISTS shop (note TEXT)"


def _folder() -> Path:
    """The disk of this process's machine."""
    fiber = here()
    assert fiber is not None, "a process asks"
    found: disk.Disk = current_world().disks[fiber.process.machine]  # type: ignore[attr-defined]
    return found.folder


async def _again(notes: Notes, error: Exception) -> None:
    """A patient program tries again what may pass, and all that its own database says."""
    if isinstance(error, postroom.PostroomError) and not passes(error):
        raise error
    notes.world.trace(f"not now: {error}"[:150])
    await asyncio.sleep(0.05)


# ---- spools ----


class _Spooling(Sending):
    def __init__(self, notes: Notes, sender: Sender, me: str, spool: Spool) -> None:
        super().__init__(notes, sender, me, spool)  # type: ignore[arg-type]
        self._keys = sender.name  # others would be stored before what waits here

    async def _some(self) -> None:
        messages = self._messages(3)
        for message in messages:
            notes, draw = self._notes, self._draw
            receipt = await self._mq.send(TOPIC, message.value, key=message.key, delay=message.delay)
            self._confirmed(message, receipt)
            await asyncio.sleep(2 * notes.plan.flush_s * draw.random())


async def spool(notes: Notes, sender: Sender, me: str, url: str) -> None:
    """Until the queue has all of it, also what processes before this one have left in the file."""
    await is_ready(notes)
    while sender.name not in notes.done:
        try:
            shards = notes.shards_of(url)
            async with Spool(_folder() / f"{sender.name}.spool", url, shards=shards) as one:
                await _Spooling(notes, sender, me, one).run()
                while not await one.forwarded(1):
                    notes.world.trace(f"in the spool: {one.spooled.messages}")
                notes.done.add(sender.name)
        except postroom.PostroomError as error:
            await _again(notes, error)


# ---- outboxes ----


class _RolledBack(Exception):
    pass


class _Writing(Sending):
    def __init__(
        self,
        notes: Notes,
        sender: Sender,
        me: str,
        mq: postroom.Connection,
        outbox: Outbox,
        shop: disk.PlainConnection,
    ) -> None:
        super().__init__(notes, sender, me, mq)
        self._keys, self._outbox, self._shop = sender.name, outbox, shop

    async def _some(self) -> None:
        """A transaction of the sender's own; some are rolled back."""
        if self._draw.random() < 0.2:
            self._write([postroom.Message(b"rolled back", key=self._keys)], fails=True)
        messages = self._messages(2)
        if self._write(messages):
            for message in messages:
                self._notes.note("confirmed", self._me, bytes(message.value).decode())
        else:
            await asyncio.sleep(0.05)

    def _write(self, messages: list[postroom.Message], *, fails: bool = False) -> bool:
        """Blocks, as such programs do; returns whether it is committed."""
        try:
            with self._outbox.transaction(self._shop):
                self._shop.execute("INSERT INTO shop VALUES (?)", (self._me,))
                self._outbox.send_many(self._shop, TOPIC, messages)
                if fails:
                    raise _RolledBack
        except _RolledBack:
            return False
        except sqlite3.Error as error:
            self._notes.world.trace(f"not written: {error}")
            return False
        return True


def _path(sender: Sender, url: str) -> str:
    """Where it may, the outbox is in the queue's own file: rows then leave with the append."""
    within = sender.within and url.startswith("sqlite:")
    return url.removeprefix("sqlite:///") if within else str(_folder() / f"{sender.name}.db")


async def own_database(notes: Notes, sender: Sender, me: str, url: str) -> None:
    """Until the queue has all that was committed; a relay runs beside it."""
    await is_ready(notes)
    mq, path, outbox = await connected(notes, url), _path(sender, url), Outbox()
    while sender.name not in notes.done:
        shop = disk.connect(path)
        try:
            outbox.create_table(shop)
            shop.execute(_TABLE)
            async with outbox.relay(mq, lambda: disk.connect(path), lease=_LEASE_S, poll=_LOOK_S):
                await _Writing(notes, sender, me, mq, outbox, shop).run()
                while outbox.status(shop).messages:  # noqa: ASYNC110 - other processes send them
                    await asyncio.sleep(0.1)
                notes.done.add(sender.name)
        except (postroom.PostroomError, sqlite3.Error) as error:
            await _again(notes, error)
        finally:
            shop.close()
    await mq.close()


async def relay(notes: Notes, sender: Sender, me: str, url: str) -> None:
    """Another relay of that outbox: leads once the first does not."""
    await is_ready(notes)
    mq, path = await connected(notes, url), _path(sender, url)
    while True:
        try:
            async with Outbox().relay(mq, lambda: disk.connect(path), lease=_LEASE_S, poll=_LOOK_S):
                await asyncio.Event().wait()
        except (postroom.SchemaMismatch, sqlite3.Error):  # its tables are not made yet
            await asyncio.sleep(0.1)
