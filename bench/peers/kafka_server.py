"""A Kafka broker that is its own controller, from the jars that `peers_install.sh` fetched."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.servers.places import free_port

from .peer import HOST, NotInstalled, ServerProcess, program

__all__ = ["kafka_server"]

CLUSTER = "AAAAAAAAQACAAAAAAAAAAQ"
CONFIG = """
process.roles=broker,controller
node.id=1
listeners=PLAINTEXT://{host}:{port},CONTROLLER://{host}:{controller}
advertised.listeners=PLAINTEXT://{host}:{port}
controller.listener.names=CONTROLLER
controller.quorum.voters=1@{host}:{controller}
log.dirs={folder}/logs
num.partitions={partitions}
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
"""


def jars() -> Path:
    """Where `peers_install.sh` puts them."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("POSTROOM_BENCH_KAFKA") or Path(cache, "postroom-bench", "kafka"))


@contextmanager
def kafka_server(partitions: int = 1) -> Iterator[str]:
    """Topics that nobody has created get so many partitions."""
    if not jars().is_dir():
        raise NotInstalled("not installed: make peers (Maven fetches its jars)")
    java = program("java", "apt-get install default-jre-headless (or, as root: make peers)")
    with ServerProcess("kafka") as server:
        port, config = free_port(), server.folder / "server.properties"
        places = {"port": port, "controller": free_port(), "folder": server.folder}
        config.write_text(CONFIG.format(host=HOST, partitions=partitions, **places))
        run = [java, "-Xms1g", "-Xmx1g", "-cp", f"{jars()}/*"]
        form = [*run, "kafka.tools.StorageTool", "format", "-t", CLUSTER, "-c", str(config)]
        subprocess.run(form, check=True, capture_output=True, timeout=60)
        server.start([*run, "kafka.Kafka", config], port)
        yield f"{HOST}:{port}"
