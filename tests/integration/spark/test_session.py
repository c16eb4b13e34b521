"""A session on a machine without Java: with the one that comes with the package, or with none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import postroom.spark
from postroom.errors import InvalidSetting
from tests.integration.spark.streams import send

JOB = """
import sys
import postroom.spark
spark = postroom.spark.session(master="local[1]", memory="512m")
frame = spark.read.format("postroom").options(url=sys.argv[1], subscribe="orders").load()
version = spark.sparkContext._jvm.System.getProperty("java.version")
print("read", frame.groupBy("key").count().count(), "keys on Java", version)
"""


def without_java(where: Path) -> dict[str, str]:
    """The environment of a machine that has everything but Java."""
    where.mkdir()
    for place in ("/usr/bin", "/bin"):
        for tool in Path(place).iterdir():
            if not tool.name.startswith("java") and not (where / tool.name).is_symlink():
                (where / tool.name).symlink_to(tool)
    kept = {k: v for k, v in os.environ.items() if k not in ("JAVA_HOME", "PYSPARK_PYTHON")}
    return {**kept, "PATH": str(where)}


def test_with_the_java_of_the_package(url: str, mq: Any, tmp_path: Path) -> None:
    mq.create_topic("orders", partitions=1)
    send(mq, "orders", 0, 50)
    environ = without_java(tmp_path / "bin")
    assert shutil.which("java", path=environ["PATH"]) is None
    done = subprocess.run(
        [sys.executable, "-c", JOB, url], env=environ, capture_output=True, text=True, timeout=240
    )
    assert "read 7 keys on Java 21." in done.stdout, done.stderr[-2000:]


def test_the_active_session_is_taken(spark: Any) -> None:
    assert postroom.spark.session() is spark
    with pytest.raises(InvalidSetting, match=r"a session on 'local\[2\]' is active; stop it first"):
        postroom.spark.session(master="spark://h:7077")
