"""A real cluster: a master and two workers of their own, and executors that have Postroom from the driver.

It reads a topic, and copies it into another through a broker while one of the workers is killed. Started from
the classes of the pip package. The Python of the executors has every package but ours; that is shipped with
the job, as on a cluster where nothing may be installed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyspark

from postroom.spark.session import find_java
from tests.integration.spark.streams import send

SOURCE = Path(__file__).resolve().parents[3] / "src"
HOME = Path(pyspark.__file__).parent

DRIVER = """
import sys
import postroom.spark
master, url, token, package, where = sys.argv[1:]
spark = postroom.spark.session(master=master, memory="600m", config={
    "spark.submit.pyFiles": package, "spark.executor.memory": "512m", "spark.driver.host": "127.0.0.1",
    "spark.cores.max": 2, "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
})
options = dict(url=url, token=token, subscribe="orders", minPartitions=4, startingOffsets="earliest")
frame = spark.read.format("postroom").options(**options).load()

def executors(rows):
    import os, postroom
    yield len(list(rows)), postroom.__file__, os.environ["SPARK_EXECUTOR_DIRS"]

found = frame.rdd.mapPartitions(executors).collect()
stream = spark.readStream.format("postroom").options(**options).load()
query = stream.writeStream.format("parquet").option("checkpointLocation", where + "/checkpoint")
query = query.trigger(availableNow=True).start(where + "/out")
query.awaitTermination()
assert token not in query.lastProgress.json
print("rows", sum(rows for rows, _, _ in found), spark.read.parquet(where + "/out").count())
print("executors", len({where for _, _, where in found}))
print("shipped", all("postroom.zip" in file for _, file, _ in found))

columns = "key", "value", "concat(topic, '-', partition) source_partition", "`offset` source_offset"
stream = spark.readStream.format("postroom").options(**options, maxOffsetsPerTrigger=200).load()
query = stream.selectExpr(*columns).writeStream.format("postroom")
query = query.options(url=url, token=token, topic="copied")
query = query.option("checkpointLocation", where + "/copied").trigger(availableNow=True).start()
query.awaitTermination()
print("copied")
"""
ROWS = 1000


@dataclass
class Cluster:
    master: str  # its address
    workers: list[subprocess.Popen[bytes]]

    def kill_a_worker(self) -> None:
        """With its executor, and without a word to anybody."""
        os.killpg(self.workers[0].pid, 9)
        self.workers[0].wait(60)


@contextmanager
def cluster(where: Path) -> Iterator[Cluster]:
    environ = {
        **os.environ,
        "JAVA_HOME": str(find_java()),
        "SPARK_HOME": str(HOME),
        "SPARK_WORKER_DIR": str(where / "work"),
        "SPARK_DAEMON_MEMORY": "256m",
    }
    running: list[subprocess.Popen[bytes]] = []

    def start(name: str, kind: str, *words: str) -> Path:
        log = where / f"{name}.log"
        command = [str(HOME / "bin" / "spark-class"), f"org.apache.spark.deploy.{kind}"]
        with log.open("wb") as out:
            running.append(
                subprocess.Popen(
                    [*command, "--host", "127.0.0.1", "--webui-port", "0", *words],
                    env=environ,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
        return log

    try:
        master = said(start("master", "master.Master", "--port", "0"), r"spark://127\.0\.0\.1:\d+")
        for n in range(2):
            start(f"worker-{n}", "worker.Worker", "-c", "1", "-m", "700m", master)
        yield Cluster(master, running[1:])
    finally:
        for process in reversed(running):
            if process.poll() is None:
                os.killpg(process.pid, 15)
                process.wait(60)


def said(log: Path, pattern: str) -> str:
    deadline = time.monotonic() + 120
    while (found := re.search(pattern, log.read_text())) is None:
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    return found[0]


def test_a_cluster_with_what_is_shipped_and_a_worker_that_dies(mq: Any, tmp_path: Path) -> None:
    mq.create_topic("orders", partitions=2)
    mq.create_topic("copied", partitions=2)
    send(mq, "orders", 0, ROWS)
    package = shutil.make_archive(str(tmp_path / "postroom"), "zip", SOURCE)
    python = tmp_path / "python"  # without `site`, and so without the package that is installed for the tests
    python.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{HOME.parent}" exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    token = "pst_" + "z" * 43
    with mq.serve("127.0.0.1", 0, token=token) as served, cluster(tmp_path) as running:
        command = [sys.executable, "-c", DRIVER, running.master, served.url, token, package, str(tmp_path)]
        driver = subprocess.Popen(
            command,
            env={**os.environ, "PYSPARK_PYTHON": str(python)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            with ThreadPoolExecutor(1) as reading:
                output = reading.submit(driver.communicate, timeout=270)
                while driver.poll() is None and not copied(mq):
                    time.sleep(0.1)
                running.kill_a_worker()
                assert len(copied(mq)) < ROWS, "it was in the middle"
                out, err = output.result()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(driver.pid, 9)
    lines = out.splitlines()
    assert lines[:3] == [f"rows {ROWS} {ROWS}", "executors 2", "shipped True"], err[-3000:]
    assert lines[3:] == ["copied"], err[-3000:]
    assert copied(mq) == list(range(ROWS))
    assert token not in err


def copied(mq: Any) -> list[int]:
    return sorted(int(message.value) for message in mq.read("copied"))
