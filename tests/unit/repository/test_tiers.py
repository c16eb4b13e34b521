"""Nothing is lost between the default run and the whole matrix (`tests.tiers`): their tests are compared."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import tiers

ROOT = Path(__file__).parents[3]
# Collects everything, and tells of each test where it would run.
COLLECT = """
import json, sys
import pytest

class Collector:
    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        from tests.unit.repository.test_tiers import rows_of  # pytest wants to import it first

        with open(sys.argv[1], "w") as file:
            json.dump(rows_of(items), file)

sys.exit(pytest.main(["--collect-only", "-qq", "--matrix=all", "-p", "no:cacheprovider"], [Collector()]))
"""
Row = tuple[str, str, bool, str | None]


@dataclass(frozen=True)
class Collected:
    """`why_slow`: None, if it is in the default run wherever that goes."""

    test: str
    function: str
    chosen: bool
    why_slow: str | None

    @property
    def by_default(self) -> bool:
        return self.chosen and self.why_slow is None


def rows_of(items: list[pytest.Item]) -> list[Row]:
    kept = tiers.in_default_run(items)
    return [
        (item.nodeid, tiers.function_of(item), item in kept, tiers.reason_to_wait(item)) for item in items
    ]


@pytest.fixture(scope="module")
def collected(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> list[Collected]:
    """By this run, if it has looked at everything; else by one of its own, which takes ten seconds."""
    if tiers.WHOLE in pytestconfig.stash:
        return [Collected(*row) for row in rows_of(pytestconfig.stash[tiers.WHOLE])]
    found = tmp_path_factory.mktemp("tiers") / "tests.json"
    done = subprocess.run(
        [sys.executable, "-c", COLLECT, str(found)], cwd=ROOT, capture_output=True, text=True, timeout=110
    )
    assert found.exists(), done.stdout[-2000:] + done.stderr[-2000:]
    return [Collected(*row) for row in json.loads(found.read_text())]


def test_every_function_is_in_the_default_run_or_says_why_not(collected: list[Collected]) -> None:
    default = {test.function for test in collected if test.by_default}
    excused = {test.function for test in collected if test.why_slow}
    assert {test.function for test in collected} - default - excused == set()


def test_slow_tests_say_why(collected: list[Collected]) -> None:
    assert [test.test for test in collected if test.why_slow == ""] == []


def test_few_of_many_parameters_are_in_the_default_run(collected: list[Collected]) -> None:
    pages = [test for test in collected if "::test_a_page_does_what_it_shows[" in test.test]
    assert 0 < sum(test.by_default for test in pages) < len(pages)


def test_all_places_are_in_the_default_run(collected: list[Collected]) -> None:
    """As many tests here as there, more or less: a hash that favours one would leave another untested."""
    sdk = [test.test for test in collected if test.by_default and "contract/sdk/" in test.test]
    places = ("memory", "sqlite", "sqlite-served", "postgres", "postgres-served", "mysql", "mysql-served")
    for place in places:
        assert sum(test.endswith(f"[{place}]") for test in sdk) >= 5, place
    for server in ("postgres", "mariadb"):
        assert sum(f"[{server}" in test.test for test in collected if test.by_default) >= 40, server


def test_the_store_contract_runs_in_full_on_a_file_and_in_part_elsewhere(collected: list[Collected]) -> None:
    def run(name: str, *, default: bool) -> int:
        return sum(f"::{name}::" in test.test and (test.by_default or not default) for test in collected)

    assert run("TestSqliteFile", default=True) == run("TestSqliteFile", default=False) > 500
    for elsewhere in ("TestPostgres", "TestMariaDB", "TestSecondShard", "TestSqliteMemory"):
        assert 20 < run(elsewhere, default=True) < run(elsewhere, default=False), elsewhere


def test_a_part_that_runs_on_servers_in_turn_runs_on_one_of_them(collected: list[Collected]) -> None:
    def on(server: str, part: str) -> set[str]:
        return {
            test.test.rpartition("::")[2]
            for test in collected
            if f"::Test{server}::" in test.test and f".{part}." in test.function and test.by_default
        }

    def all_of(part: str) -> set[str]:
        return {
            test.test.rpartition("::")[2]
            for test in collected
            if "::TestPostgres::" in test.test and f".{part}." in test.function
        }

    assert on("Postgres", "concurrency") == on("MariaDB", "concurrency") == all_of("concurrency") != set()
    here, there = on("Postgres", "served"), on("MariaDB", "served")
    assert here and there and not here & there and here | there == all_of("served")


@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("test", "-m 'not slow'"),
        ("test-all", "--matrix=all -m 'not spark'"),
        ("test-spark", "--matrix=all -m spark"),
    ],
)
def test_make_runs_what_was_compared(target: str, options: str) -> None:
    (recipe,) = re.findall(rf"^{target}:.*\n\t(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    words = recipe.split(" -m pytest ")[1]
    assert options in words
    assert words.count(" -m ") == 1 and words.count("--matrix") == options.count("--matrix")
