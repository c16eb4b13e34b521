"""Where a server is not installed, and where the tests end early: small pytest runs of their own show it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.servers import MariaServer, MissingServer, PostgresServer, binaries
from tests.servers.processes import running
from tests.servers.server import Server

ROOT = Path(__file__).resolve().parents[3]
TESTS = """
    def test_postgres(postgres_url): pass
    def test_mariadb(own_mariadb): pass
    def test_neither(): pass
"""


class Project:
    """A folder with tests that use our fixtures."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.write("pytest.ini", "[pytest]\n")

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(textwrap.dedent(text))

    def start(self, *args: str, **env: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "tests.servers.fixtures"]
        settings = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **env}
        return subprocess.Popen(
            [*command, *args],
            cwd=self.folder,
            env=settings,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,  # so that a test can signal all of it, as a terminal does
        )


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


@pytest.fixture
def bare(project: Project) -> Project:
    """Nothing is installed where it is run."""
    project.write(
        "conftest.py",
        """
        from tests.servers import binaries

        binaries.POSTGRES_FOLDERS = binaries.MARIADB_FOLDERS = ()
        """,
    )
    project.write("test_it.py", TESTS)
    return project


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A PATH with one empty folder, which is returned, and no other place to look."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(binaries, "POSTGRES_FOLDERS", ())
    monkeypatch.setattr(binaries, "MARIADB_FOLDERS", ())
    return tmp_path


def programs(folder: Path, *names: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).touch(mode=0o755)


# --- finding -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("nothing_installed")
def test_what_is_missing_is_named_together_with_its_package() -> None:
    with pytest.raises(
        MissingServer, match=r"PostgreSQL's server is not installed\. Install it: .*postgresql"
    ):
        binaries.find_postgres()
    with pytest.raises(MissingServer, match=r"MariaDB's server is not installed\. Install it: .*mariadb"):
        binaries.find_mariadb()


def test_half_an_installation_does_not_count(nothing_installed: Path) -> None:
    """Debian's client packages bring some of the programs."""
    programs(nothing_installed, "postgres", "mysqld")
    with pytest.raises(MissingServer):
        binaries.find_postgres()
    with pytest.raises(MissingServer):
        binaries.find_mariadb()


def test_path_comes_first_then_the_newest_version(
    nothing_installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = nothing_installed / "lib"
    for version in ("9.6", "15", "17"):
        programs(elsewhere / version / "bin", "postgres", "initdb")
    monkeypatch.setattr(binaries, "POSTGRES_FOLDERS", (f"{elsewhere}/*/bin",))
    assert binaries.find_postgres() == elsewhere / "17" / "bin"
    programs(nothing_installed, "postgres", "initdb")
    assert binaries.find_postgres() == nothing_installed


def test_mariadb_by_either_name(nothing_installed: Path) -> None:
    programs(nothing_installed, "mysqld", "mariadb-install-db")
    assert binaries.find_mariadb()[0].name == "mysqld"
    programs(nothing_installed, "mariadbd")
    assert binaries.find_mariadb()[0].name == "mariadbd"


# --- a run without servers -----------------------------------------------------------------------------


def test_on_a_laptop_tests_are_skipped_and_the_summary_says_so(bare: Project) -> None:
    run = bare.start("-n", "1", PATH="")  # the skips happen in one process, the summary in another
    output = run.communicate(timeout=60)[0]
    assert run.returncode == 0
    assert "1 passed, 2 skipped" in output
    assert "!! NOT TESTED: a server is missing !!" in output
    for name in ("PostgreSQL", "MariaDB"):
        assert f"1 skipped. {name}'s server is not installed. Install it: " in output


def test_in_ci_a_missing_server_fails(bare: Project) -> None:
    run = bare.start(PATH="", CI="1")
    output = run.communicate(timeout=60)[0]
    assert run.returncode == 1
    assert "1 passed, 2 errors" in output and "NOT TESTED" not in output
    assert "PostgreSQL's server is not installed" in output


def test_nothing_is_said_where_nothing_is_missing(project: Project) -> None:
    project.write("test_it.py", "import pytest\n\ndef test_it(): pytest.skip('another reason')\n")
    assert "NOT TESTED" not in project.start().communicate(timeout=60)[0]


# --- a run that ends early -----------------------------------------------------------------------------

WAITING = """
    import time
    from pathlib import Path

    def test_it(postgres_server, own_mariadb):
        servers = [postgres_server, own_mariadb]
        text = "\\n".join(f"{server.pid} {server.folder}" for server in servers)
        Path("unfinished").write_text(text)
        Path("unfinished").rename("servers")
        time.sleep(100)
"""


def servers_of(project: Project) -> list[tuple[int, Path]]:
    """Process and folder of each server, once the test in the other process has them."""
    until((project.folder / "servers").exists, "both servers run")
    lines = (project.folder / "servers").read_text().splitlines()
    return [(int(pid), Path(folder)) for pid, folder in (line.split() for line in lines)]


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 40
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.fixture
def waiting(project: Project, postgres_server: PostgresServer, mariadb_server: MariaServer) -> Project:
    """Its servers begin with copies of the data folders that ours began with: to make them takes seconds."""
    assert Server.pristine is not None
    made = {folder.name for folder in Server.pristine.iterdir() if folder.is_dir()}
    assert made == {postgres_server.kind, mariadb_server.kind}
    project.write(
        "conftest.py",
        f"""
        from pathlib import Path

        from tests.servers.server import Server

        Server.pristine = Path({str(Server.pristine)!r})
        """,
    )
    project.write("test_it.py", WAITING)
    return project


@pytest.fixture
def started(waiting: Project, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    with waiting.start(*request.param) as run:
        yield run
        run.kill()


@pytest.mark.parametrize(
    ("started", "number"),
    [((), signal.SIGINT), (("-n", "1"), signal.SIGINT), ((), signal.SIGKILL)],
    indirect=["started"],
    ids=["ctrl-c", "ctrl-c with xdist", "SIGKILL"],
)
def test_no_server_outlives_the_tests(
    project: Project, started: subprocess.Popen[str], number: signal.Signals
) -> None:
    servers = servers_of(project)
    assert all(running(pid) and folder.exists() for pid, folder in servers)
    os.killpg(started.pid, number)
    started.wait(timeout=60)
    until(lambda: not any(running(pid) or folder.exists() for pid, folder in servers), "all is gone")


@pytest.mark.slow("a run of pytest with servers of its own")
def test_no_server_outlives_a_failing_test(waiting: Project) -> None:
    waiting.write("test_it.py", WAITING.replace("time.sleep(100)", "assert False"))
    run = waiting.start()
    output = run.communicate(timeout=60)[0]
    assert "1 failed" in output
    assert not any(running(pid) or folder.exists() for pid, folder in servers_of(waiting))
