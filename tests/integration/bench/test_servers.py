"""The row queues Postroom is compared with do what a queue has to: a contender that cheats proves nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from bench.server_rows import MariaRowQueue, PostgresRowQueue, ServerRowQueue, variants

pytestmark = pytest.mark.slow("measures speed")


@pytest.mark.parametrize("number", range(6))
async def test_every_message_is_consumed_once(
    number: int, postgres_url: str, mysql_url: str, tmp_path: Path
) -> None:
    queue = variants(postgres_url, mysql_url)[number]()
    await queue.open(tmp_path)
    sent = await asyncio.gather(*(queue.publish([b"value %d" % i] * 50) for i in range(20)))
    await queue.start_consuming(70)
    taken = 0
    while some := sum(await asyncio.gather(*(queue.consume(70) for _ in range(4)))):
        taken += some
    await queue.close()
    assert taken == sum(sent) == 1000


@pytest.mark.parametrize("kind", [PostgresRowQueue, MariaRowQueue])
async def test_what_is_leased_is_not_given_to_others_and_not_gone(
    kind: type[ServerRowQueue], postgres_url: str, mysql_url: str, tmp_path: Path
) -> None:
    queue = kind(postgres_url if kind is PostgresRowQueue else mysql_url)
    await queue.open(tmp_path)
    await queue.publish([b"value"] * 100)
    leased = await queue._run(queue._lease, 30)
    assert await queue.consume(1000) == 70
    await queue._run(queue._ack, [row_id for row_id, _ in leased[:10]])
    assert await queue._run(_rows) == 20
    await queue.close()


def _rows(connection: Any) -> int:
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM messages")
        return int(cursor.fetchone()[0])
