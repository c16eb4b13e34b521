"""Run by an earlier version: makes a queue as it did, or says why it does not open the one there is.

    PYTHONPATH=… python -m tests.upgrade.founder URL [LEASE]

With a lease it makes the tables, topics and groups; without one it only connects.
"""

from __future__ import annotations

import asyncio
import sys

import postroom

__all__ = ["TOPICS"]

TOPICS = {"orders": {"billing": False, "ledger": True}, "later": {"billing": False}}
"""By topic, its groups, and whether they are ordered."""


async def _main(url: str, lease: str = "") -> None:
    async with postroom.connect(url, migrate=bool(lease)) as mq:
        for topic, groups in TOPICS.items() if lease else ():
            await mq.create_topic(topic, partitions=3)
            for group, ordered in groups.items():
                mode = "ordered" if ordered else "shared"
                await mq.create_group(topic, group, mode=mode, lease=float(lease), max_attempts=10)


if __name__ == "__main__":
    try:
        asyncio.run(_main(*sys.argv[1:]))
    except postroom.SchemaMismatch as refused:
        sys.exit(f"{refused.code}: {refused}")
