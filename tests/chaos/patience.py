"""Connecting as a patient program does: a database that is away comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import postroom

__all__ = ["connected"]


async def connected(url: str, shards: Mapping[str, str]) -> postroom.Connection:
    """`shards`: the addresses of others than the first."""
    while True:
        try:
            return await postroom.connect(url, shards=shards)
        except postroom.PostroomError as error:
            if not error.retriable:
                raise
        await asyncio.sleep(0.05)
