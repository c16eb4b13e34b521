"""Connecting as a patient program does: a database that is away comes back."""

from __future__ import annotations

import asyncio

import penstock

__all__ = ["connected"]


async def connected(url: str) -> penstock.Connection:
    while True:
        try:
            return await penstock.connect(url)
        except penstock.PenstockError as error:
            if not error.retriable:
                raise
        await asyncio.sleep(0.05)
