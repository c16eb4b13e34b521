"""Spark's own Kafka source and sink, to compare with: the connector's jars, and a broker with the messages.

`make peers` fetches both through Maven. Where they are missing, the comparison says so and goes without.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .peers.kafka_server import kafka_server
from .peers.peer import NotInstalled

__all__ = ["PARTITIONS", "connector", "connector_settings", "kafka"]

PARTITIONS = 4
_NAME = "spark-sql-kafka"


def _folder() -> Path:
    """Where `peers_install.sh` puts the jars."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("POSTROOM_BENCH_SPARK_KAFKA") or Path(cache, "postroom-bench", "spark-kafka"))


def connector() -> str | None:
    """Which one is here, with its version."""
    found = sorted(jar.stem for jar in _folder().glob(f"{_NAME}*.jar"))
    return found[0] if found else None


def connector_settings() -> dict[str, object]:
    """For the session: Spark takes jars only at its start."""
    return {"spark.jars": ",".join(map(str, sorted(_folder().glob("*.jar"))))} if connector() else {}


@contextmanager
def kafka() -> Iterator[str]:
    """The address of a broker. NotInstalled: what to do about it."""
    if connector() is None:
        raise NotInstalled("Spark's Kafka connector is not installed: make peers (Maven fetches its jars)")
    with kafka_server(partitions=PARTITIONS) as address:
        yield address
