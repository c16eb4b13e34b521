"""Where tests of the SDK run: the stores, by name, and who opens them.

    embedded   the SDK opens the store itself, in this process
    served     a broker in this process and event loop has it open, and the SDK connects to that broker

A test runs embedded in memory and on a file, and served on a file; marked `everywhere`, on the database
servers too, both ways. POSTROOM_TEST_STORES=all does that to every test, and POSTROOM_TEST_ENDPOINTS=all
serves the store in memory as well: both take some minutes. Tests that say what only an embedded broker does
are marked `embedded`, with the reason.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

import pytest

from postroom import Connection

__all__ = ["SERVERS", "Open", "Place", "embedded", "everywhere", "only_file", "places", "real_time"]

Open = Callable[[], AbstractAsyncContextManager[Connection]]
Place = tuple[str, str]  # a store, and who opens it

HERE = ("memory", "sqlite")
SERVERS = {"postgres": "postgres_ready", "mysql": "mysql_ready"}  # name → fixture
EVERYWHERE = (*HERE, *SERVERS)
ALL_STORES = os.environ.get("POSTROOM_TEST_STORES") == "all"
ALL_ENDPOINTS = os.environ.get("POSTROOM_TEST_ENDPOINTS") == "all"

everywhere = pytest.mark.stores(*EVERYWHERE)
"""Marks a test of what the databases may do differently."""
real_time = pytest.mark.parametrize("clock", [None], ids=["real time"])
only_file = pytest.mark.stores("sqlite")
embedded = pytest.mark.embedded
"""`@embedded("why")`: the test is about what a broker in the process of its user does."""


def places(stores: Sequence[str] | None, *, served: bool) -> list[Place]:
    """Where a test runs that asks for these stores, or for none."""
    chosen = tuple(stores or (EVERYWHERE if ALL_STORES else HERE))
    found = [(store, "embedded") for store in chosen]
    if served:
        found += [(store, "served") for store in chosen if store != "memory" or ALL_ENDPOINTS]
    return found
