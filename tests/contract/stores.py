"""Where tests of the SDK run: the stores, by name, and who opens them.

    embedded   the SDK opens the store itself, in this process
    served     a broker in this process and event loop has it open, and the SDK connects to that broker

A test can run embedded in memory and on a file, and served on a file; marked `everywhere`, on the database
servers too, both ways. By default it runs at one of these places, with `--matrix=all` at all (`tests.tiers`).
POSTROOM_TEST_STORES=all marks every test `everywhere`, and POSTROOM_TEST_ENDPOINTS=all serves the store in
memory as well: both take some minutes more. Tests that say what only an embedded broker does are marked
`embedded`, with the reason.

The store contract runs on an SQLite file; by default, of its parts only those run elsewhere that are marked
`dialect` (SQL, locks, flushing, time and races differ; on one server in turn where order and races do not
matter), `routing` (a shard is looked up) and `smoke`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

import pytest

from postroom import Connection

__all__ = [
    "SERVERS",
    "Open",
    "Place",
    "dialect",
    "embedded",
    "everywhere",
    "only_file",
    "places",
    "real_time",
    "routing",
    "smoke",
]

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
dialect = pytest.mark.parts(
    *("appending", "concurrency", "polling", "schedule"),
    in_turn=("catalog", "duties", "ids", "listing", "moving", "reading", "served"),
)
routing = pytest.mark.parts(
    *("catalog", "concurrency", "listing", "moving", "routes", "schedule", "staging_published")
)
smoke = pytest.mark.parts("appending", "concurrency")
embedded = pytest.mark.embedded
"""`@embedded("why")`: the test is about what a broker in the process of its user does."""


def places(stores: Sequence[str] | None, *, served: bool) -> list[Place]:
    """Where a test runs that asks for these stores, or for none."""
    chosen = tuple(stores or (EVERYWHERE if ALL_STORES else HERE))
    found = [(store, "embedded") for store in chosen]
    if served:
        found += [(store, "served") for store in chosen if store != "memory" or ALL_ENDPOINTS]
    return found
