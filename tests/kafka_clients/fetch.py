"""Clients and suites, fetched once from the registries that carry them, into a folder of the user's cache.

A thing is complete or not there at all: it is made in a folder beside its place, and moved. Versions are
pinned here; a new version is a new folder. `Missing` says which program is needed to fetch or build it.
"""

from __future__ import annotations

import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

from .running import Ran, run

__all__ = ["Missing", "franz_go", "kafka_python", "kafka_tools", "kcat", "librdkafka"]

_LIMIT_S = 900
_SERVICE = '''"""Left out of the archive: a broker that runs already needs nothing."""


class ExternalService:
    def __init__(self, host, port):
        self.host, self.port = host, port

    def open(self): ...
    def close(self): ...


class SpawnedService: ...
'''
_KAFKA_TOOLS = "4.3.1"


class Missing(Exception):
    """It cannot be had here; the message says what to do about it."""


def cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("POSTROOM_KAFKA_CLIENTS") or Path(home, "postroom-kafka-clients"))


def _made(name: str, make: Callable[[Path], None]) -> Path:
    place = cache() / name
    if not place.is_dir():
        cache().mkdir(parents=True, exist_ok=True)
        print(f"fetching {name}", file=sys.stderr, flush=True)
        part = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=cache()))
        try:
            make(part)
            part.chmod(0o755)
            part.rename(place)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return place


def _do(command: list[str | Path], cwd: Path, how: str, **env: str) -> Ran:
    program = str(command[0])
    if shutil.which(program) is None and not Path(cwd, program).exists():
        raise Missing(f"needs {program}: {how}")
    ran = run(command, _LIMIT_S, cwd=cwd, env=env)
    if ran.code:
        raise Missing(f"{program} failed with {ran.code}: {ran.last_line}; {how}")
    return ran


def _unpacked(archive: Path, into: Path, inside: str = "") -> None:
    """The archive's folder `inside`, without its first part."""
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            name = member.name.partition("/")[2]
            if name and (not inside or name.startswith(f"{inside}/")):
                member.name = name.removeprefix(f"{inside}/")
                tar.extract(member, into, filter="data")
    archive.unlink()


# ---- each ----


def kcat() -> Path:
    """Debian's, with the old librdkafka that it was built for: the program."""

    def make(place: Path) -> None:
        packages = ["kcat", "librdkafka1", "libyajl2"]
        _do(
            ["apt-get", "download", *packages], place, "the suite is Debian's package", APT_LISTCHANGES="none"
        )
        for package in sorted(place.glob("*.deb")):
            _do(["dpkg-deb", "-x", package, place], place, "it unpacks Debian's packages")
            package.unlink()

    return _made("kcat", make)


def kafka_python(version: str = "3.0.12") -> Path:
    """The source archive, which has the integration tests but for a module and a folder that they name."""

    def make(place: Path) -> None:
        wanted = ["--no-deps", "--no-binary", ":all:", f"kafka-python=={version}"]
        _do([sys.executable, "-m", "pip", "download", "-q", *wanted, "-d", place], place, "install pip")
        [archive] = place.glob("*.tar.gz")
        _unpacked(archive, place)
        (place / "test" / "__init__.py").touch()
        (place / "test" / "service.py").write_text(_SERVICE)
        (place / "servers" / "4.3.0" / "kafka-bin").mkdir(parents=True)
        (place / "pytest.ini").write_text("[pytest]\n")

    return _made(f"kafka-python-{version}", make)


def franz_go(version: str = "v1.22.2") -> Path:
    """The folder of the package kgo, with its tests built: `kgo.test`."""
    how = "install Go 1.24 or newer"

    def make(place: Path) -> None:
        _do(["go", "mod", "download", f"github.com/twmb/franz-go@{version}"], place, how)
        modules = Path(_do(["go", "env", "GOMODCACHE"], place, how).said.strip())
        source = modules / "github.com" / "twmb" / f"franz-go@{version}"
        shutil.copytree(source, place, dirs_exist_ok=True, copy_function=shutil.copyfile)
        for folder in [place, *(path for path in place.rglob("*") if path.is_dir())]:
            folder.chmod(0o755)  # modules are read-only
        _do(["go", "test", "-c", "-o", "kgo.test", "."], place / "pkg" / "kgo", how)

    return _made(f"franz-go-{version}", make) / "pkg" / "kgo"


def librdkafka(carrier: str = "1.10.1") -> Path:
    """The folder of its tests, built. The Node client of that version carries librdkafka 2.15.1 with them."""
    how = "install a C and C++ compiler, make, npm, and zstd's headers (libzstd-dev)"

    def make(place: Path) -> None:
        _do(["cc", "-fsyntax-only", "-include", "zstd.h", "-x", "c", "/dev/null"], place, how)
        _do(["npm", "pack", "--silent", f"@confluentinc/kafka-javascript@{carrier}"], place, how)
        [archive] = place.glob("*.tgz")
        _unpacked(archive, place, "deps/librdkafka")
        _do(["./configure", "--disable-curl", "--disable-sasl"], place, how)
        _do(["make", "-j2", "libs"], place, how)
        _do(["make", "-j2", "-C", "tests", "build"], place, how)

    return _made(f"librdkafka-{carrier}-zstd", make) / "tests"


def kafka_tools(version: str = _KAFKA_TOOLS) -> Path:
    """A folder of jars: Kafka's own command-line tools."""

    def make(place: Path) -> None:
        pom = place / "pom.xml"
        shutil.copy(Path(__file__).with_name("kafka-tools-pom.xml"), pom)
        copy = ["dependency:copy-dependencies", f"-DoutputDirectory={place}", f"-Dtools={version}"]
        _do(["mvn", "-q", "-B", "-f", pom, *copy], place, "install Maven and a Java of 17 or newer")

    return _made(f"kafka-tools-{version}", make)
