"""The jar that Spark needs for tables and catalogs, with its sources.

A catalog is a class of Java's; this one hands everything on to the data source in Python. The jar comes with
the package, built from the sources beside it by `make jar`; a digest of them in the jar tells whether it is
theirs. The same sources and the same compiler give the same bytes.
"""

from __future__ import annotations

import subprocess
import tempfile
from hashlib import sha256
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

from ...errors import UsageError

__all__ = ["CATALOG", "DIGEST", "JAR", "SOURCES", "build", "compiled", "digest"]

SOURCES = Path(__file__).parent
JAR = SOURCES / "postroom-spark.jar"
CATALOG = "postroom.spark.TopicCatalog"
DIGEST = "META-INF/postroom-sources.sha256"

_SERVICE = "META-INF/services/org.apache.spark.sql.sources.DataSourceRegister"
_SOURCE = "postroom.spark.PostroomSource"
_JAVA = "17"  # the oldest that Spark 4 runs on
_LONG_AGO = (1980, 1, 1, 0, 0, 0)


def digest() -> str:
    """Of the sources, by name."""
    found = sha256()
    for source in sorted(SOURCES.glob("*.java")):
        found.update(f"{source.name}\n{source.stat().st_size}\n".encode() + source.read_bytes())
    return found.hexdigest()


def compiled(into: Path) -> list[Path]:
    """The classes, compiled against the Spark that is installed here."""
    import pyspark

    jars = Path(pyspark.__file__).parent / "jars" / "*"
    command = ["javac", "--release", _JAVA, "-g:none", "-nowarn", "-cp", str(jars), "-d", str(into)]
    try:
        done = subprocess.run(
            [*command, *map(str, sorted(SOURCES.glob("*.java")))], capture_output=True, text=True
        )
    except FileNotFoundError:
        raise UsageError("there is no javac here: install a JDK, 17 or newer") from None
    if done.returncode:
        raise UsageError(f"javac failed:\n{done.stderr}")
    return sorted(into.rglob("*.class"))


def build(jar: Path = JAR) -> None:
    with tempfile.TemporaryDirectory() as made, ZipFile(jar, "w", ZIP_DEFLATED) as packed:
        entries = {
            "META-INF/MANIFEST.MF": b"Manifest-Version: 1.0\r\n\r\n",
            _SERVICE: f"{_SOURCE}\n".encode(),
            DIGEST: f"{digest()}\n".encode(),
        }
        for path in compiled(Path(made)):
            entries[path.relative_to(made).as_posix()] = path.read_bytes()
        for name, data in entries.items():
            packed.writestr(ZipInfo(name, _LONG_AGO), data, ZIP_DEFLATED)
