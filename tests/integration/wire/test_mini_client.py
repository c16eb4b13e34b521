"""The protocol's document is enough to write a client from."""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path
from typing import Any

import pytest

from postroom.model.messages.batch import BatchBuilder, records
from postroom.model.messages.slot import slot_of
from tests.integration.wire import mini_client
from tests.integration.wire.mini_client import MiniClient, MiniError
from tests.integration.wire.wire_raw import served


def batch(*values: bytes, sequence: int = 0) -> bytes:
    builder = BatchBuilder("lz4")
    for value in values:
        assert builder.append(1_700_000_000_000, b"key", value, [("source", b"mini")])
    return builder.build(77, 0, sequence)


def a_session(port: int) -> dict[str, Any]:
    """All of it in one go, blocking, in a thread: as another program would."""
    client = MiniClient("127.0.0.1", port)
    seen: dict[str, Any] = {"welcome": client.welcome}
    seen["topic"] = client.create_topic("orders", 4)
    partition_id = client.partition_id("orders", slot_of(b"key"))
    seen["appended"] = client.append("orders", partition_id, batch(b"one", b"two"))
    seen["repeated"] = client.append("orders", partition_id, batch(b"one", b"two"))
    seen["next"] = client.append("orders", partition_id, batch(b"three", sequence=2))
    with pytest.raises(MiniError) as gap:
        client.append("orders", partition_id, batch(b"five", sequence=9))
    seen["gap"] = gap.value.code
    client.subscribe("orders", "billing", "mini-1")
    got = []
    for token in (1001, 1002):
        for where, leases, batches in client.poll("orders", "billing", "mini-1", token, wait_ms=200):
            for lease in leases:
                got += [
                    record.value
                    for base, data in batches
                    for place, record in enumerate(records(data))
                    if lease["first"] <= base + place <= lease["last"]
                ]
                assert (
                    client.ack("orders", "billing", where, token, lease["first"], lease["last"])["lost"] == []
                )
    seen["got"] = got
    client.close()
    return seen


async def test_a_client_written_from_the_document_works() -> None:
    async with served() as (mq, server):
        seen = await asyncio.to_thread(a_session, server.port)
        assert seen["welcome"][:2] == [1, server.id]
        assert seen["topic"]["partitions"] == 4
        assert (seen["appended"]["base_offset"], seen["appended"]["duplicate"]) == (0, False)
        assert (seen["repeated"]["base_offset"], seen["repeated"]["duplicate"]) == (0, True)
        assert seen["next"]["base_offset"] == 2
        assert seen["gap"] == "sequence_gap"
        assert seen["got"] == [b"one", b"two", b"three"]
        lag = await mq.lag("orders", "billing")
        assert (lag.total.messages, lag.total.unsettled) == (0, 0)


def test_it_uses_nothing_of_ours() -> None:
    text = Path(mini_client.__file__).read_text(encoding="utf-8")
    imported = {
        name
        for node in ast.walk(ast.parse(text))
        for name in (
            [node.module or ""] if isinstance(node, ast.ImportFrom)
            else [one.name for one in node.names] if isinstance(node, ast.Import)
            else []
        )
    }  # fmt: skip
    assert not [name for name in imported if "postroom" in name]
