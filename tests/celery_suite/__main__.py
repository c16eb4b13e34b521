"""Fetches the source distributions of Celery and kombu, and runs their tests with Postroom as the broker.

    python -m tests.celery_suite [--where FOLDER] [--broker URL] [kombu|celery] [-- pytest's arguments]

Of kombu: the tests that every transport of its own passes (`t/integration/common.py`). Of Celery: its
integration tests (`t/integration`), with Redis for the results, which is started here; each file in a process
of its own, since `test_prefork_shutdown` stops every worker of its process, on any broker. `--broker redis`
runs them on that Redis, to compare.

Fails only on surprises: known failures are in `expected.toml`, with a sentence each. What is left out is
listed with the reason. An environment takes a minute and is kept. Not a part of `make test`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

from tests.kafka_clients.outcome import FAILED, PASSED, SKIPPED, Case, Judged, judged, known_failures, table

ROOT = Path(__file__).resolve().parents[2]
NEEDED = (
    "pytest<9", "pytest-rerunfailures", "pytest-subtests", "pytest-timeout", "pytest-order", "pytest-click",
    "django", "redis>=6.1,<7", "cryptography", "requests", "pydantic", "pyyaml", "msgpack", "psutil",
    "python-dateutil",
)  # fmt: skip
EXPECTED = Path(__file__).with_name("expected.toml")
FILE_S = 3600  # test_canvas takes twenty minutes on a busy machine
TEST_S = 300  # Celery's own limit

# Of Celery, what is about other programs.
LEFT_OUT = {
    "test_backend.py": "the result backend of Azure",
    "test_native_delayed_delivery_binding.py": "RabbitMQ's delayed queues, by its management plugin",
    "test_quorum_queue_qos_cluster_simulation.py": "RabbitMQ's quorum queues",
    "test_rabbitmq_chord_unlock_routing.py": "RabbitMQ's quorum queues",
    "test_rabbitmq_default_queue_type_fallback.py": "RabbitMQ's types of queues",
    "test_rabbitmq_quorum_queue_cycle_detection.py": "RabbitMQ's quorum queues",
}

# Of kombu, what Postroom does not have.
KOMBU_LEFT_OUT = {
    "BasePriority": "Postroom has no priorities within a queue",
    "BaseFailover": "of brokers Postroom takes a list: postroom://a:7070,b:7070",
}

KOMBU_TESTS = """
import os
import kombu, pytest
import postroom.integrations.celery
from .common import BaseEventLoop, BaseExchangeTypes, BaseMessage, BaseTimeToLive, BasicFunctionality

@pytest.fixture
def connection(tmp_path):
    return kombu.Connection(os.environ.get("TEST_BROKER") or f"postroom+sqlite:///{tmp_path}/queue.db")

@pytest.fixture
def invalid_connection():
    return kombu.Connection("postroom://127.0.0.1:1", transport_options={"max_retries": 1})

class test_Basic(BasicFunctionality): pass
class test_ExchangeTypes(BaseExchangeTypes): pass
class test_Message(BaseMessage): pass
class test_EventLoop(BaseEventLoop): pass
class test_TimeToLive(BaseTimeToLive): pass
"""


def environment(where: Path) -> Path:
    """Its Python, with everything but Postroom, which is taken from this checkout; made again on a change."""
    home = where / "venv"
    python, stamp = home / "bin" / "python", home / "installed"
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    wanted = [*(f"{name}=={version(name)}" for name in ("celery", "kombu")), *ours, *NEEDED]
    if not stamp.exists() or stamp.read_text() != "\n".join(wanted):
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *wanted], check=True)
        stamp.write_text("\n".join(wanted))
    return python


def version(name: str) -> str:
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    return next(pin.partition("==")[2] for pin in pins if pin.startswith(f"{name}=="))


def source(where: Path, name: str) -> Path:
    """The unpacked source distribution."""
    found = where / f"{name}-{version(name)}"
    if not found.exists():
        with tempfile.TemporaryDirectory() as folder:
            fetch = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:"]
            subprocess.run([*fetch, "-d", folder, f"{name}=={version(name)}"], check=True)
            (packed,) = Path(folder).iterdir()
            with tarfile.open(packed) as archive:
                archive.extractall(where, filter="data")
    return found


@contextmanager
def redis() -> Iterator[str]:
    """A server for results alone."""
    program = shutil.which("redis-server")
    if program is None:
        sys.exit("Celery's tests keep results in Redis: install redis-server, or run `kombu` alone")
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            yield f"redis://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait()


def run(python: Path, folder: Path, files: list[str], more: list[str], **settings: str) -> list[Case]:
    """The tests of these files, in one process."""
    paths = os.pathsep.join([str(ROOT / "src"), str(folder)])
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    print(f"{folder.name}: {' '.join(files)}", flush=True)
    with tempfile.TemporaryDirectory() as made:
        report = Path(made) / "report.xml"
        command = [
            python, "-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider", "-p", "no:postroom",
            "--timeout", str(TEST_S), "--junitxml", str(report), *files, *more,
        ]  # fmt: skip
        env = os.environ | {"PYTHONPATH": paths, "PATH": path} | settings
        try:
            subprocess.run(command, cwd=folder, env=env, check=False, timeout=FILE_S)
        except subprocess.TimeoutExpired:
            return [Case(" ".join(files), FAILED, f"did not end in {FILE_S} seconds")]
        if not report.exists():
            return [Case(" ".join(files), FAILED, "pytest ended without a report")]
        return cases(report)


def cases(report: Path) -> list[Case]:
    """By file, class and name: `test_tasks::test_tasks::test_eta`.

    A test with a subtest that failed is there twice, and has failed.
    """
    found: dict[str, Case] = {}
    for one in ElementTree.parse(report).getroot().iter("testcase"):
        where = str(one.get("classname")).removeprefix("t.integration.").split(".")
        name = "::".join([*where, str(one.get("name"))])
        case = _case(name, one)
        if name not in found or case.verdict == FAILED:
            found[name] = case
    return list(found.values())


def _case(name: str, one: ElementTree.Element) -> Case:
    for tag, verdict in (("failure", FAILED), ("error", FAILED), ("skipped", SKIPPED)):
        told = one.find(tag)
        if told is not None:
            return Case(name, verdict, (told.get("message") or "").partition("\n")[0])
    return Case(name, PASSED)


def kombu_cases(python: Path, where: Path, broker: str, more: list[str]) -> list[Case]:
    folder = source(where, "kombu")
    (folder / "t/integration/test_postroom.py").write_text(KOMBU_TESTS)
    return run(python, folder, ["t/integration/test_postroom.py"], more, TEST_BROKER=broker)


def celery_cases(python: Path, where: Path, broker: str, more: list[str]) -> Iterator[Case]:
    folder = source(where, "celery")
    files = sorted(f"t/integration/{one.name}" for one in (folder / "t/integration").glob("test_*.py"))
    files = [one for one in files if Path(one).name not in LEFT_OUT]
    chosen = [one for one in more if one.startswith("t/")]
    more = [one for one in more if one not in chosen]
    rest_of_conftest = 'pytest_plugins = ["celery.contrib.pytest"]\n'
    (folder / "conftest.py").write_text(f"import postroom.integrations.celery\n{rest_of_conftest}")
    for file in chosen or files:
        with redis() as results, tempfile.TemporaryDirectory() as queue:
            url = f"{results}/1" if broker == "redis" else broker or f"postroom+sqlite:///{queue}/queue.db"
            port = results.rpartition(":")[2]
            yield from run(python, folder, [file], more, TEST_BROKER=url, TEST_BACKEND=results,
                           REDIS_HOST="127.0.0.1", REDIS_PORT=port)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parser.add_argument("--where", type=Path, default=cache / "postroom-celery")
    parser.add_argument("--broker", default="", help="a broker_url, or redis; left out: SQLite files")
    parser.add_argument(
        "suites", nargs="*", default=["kombu", "celery"], help="kombu, celery; left out: both"
    )
    given = sys.argv[1:]
    at = given.index("--") if "--" in given else len(given)
    args, more = parser.parse_args(given[:at]), given[at + 1 :]
    args.where.mkdir(parents=True, exist_ok=True)
    python, known = environment(args.where), known_failures(EXPECTED)
    suites = {"kombu": (kombu_cases, KOMBU_LEFT_OUT), "celery": (celery_cases, LEFT_OUT)}
    results: list[Judged] = []
    for name in args.suites:
        of, left_out = suites[name]
        found = of(python, args.where, args.broker, more)
        results.append(judged(name, args.broker.partition(":")[0] or "sqlite", found, known.get(name, {})))
        for part, why in left_out.items():
            print(f"left out: {part}: {why}")
    print(table(results))
    return int(any(one.surprises for one in results))


if __name__ == "__main__":
    sys.exit(main())
