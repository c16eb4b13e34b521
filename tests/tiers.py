"""What runs by default, and what in full.

    make test        every test that is not slow, once: at one place of those that it is made for
    make test-all    every test, at every place: `--matrix=all`

A place is a store, an endpoint, a database server: a parameter that says where a test runs, not what it does.
The place is chosen by a hash of the test's name: always the same one for a test, another one for the next, so
that all places are in the default run. The store contract runs in full on an SQLite file; `parts` says what
of it runs elsewhere, and what of that `in_turn`: on one of the stores marked alike, by the same hash.
`slow("why")` keeps a test out of the default run, and `few(4, "why")` all but four of its parameters, chosen
by a hash as well.
`tests/unit/repository/test_tiers.py` sees to it that each test function is in the default run, or says why
not.
"""

from __future__ import annotations

import os
import zlib
from collections import defaultdict
from collections.abc import Generator

import pytest

__all__ = ["WHOLE", "function_of", "in_default_run", "reason_to_wait"]

WHOLE = pytest.StashKey[list[pytest.Item]]()
"""All there are, chosen or not, if this run has collected all."""

# Where an argument of such a name has such a value, it says where.
ARGUMENTS = {
    *("any_cli", "any_url", "cli", "database", "endpoint", "ground", "kind", "mq", "one_database", "place"),
    *("queue", "server", "store", "store_url", "url"),
}
VALUES = {
    *("memory", "sqlite", "postgres", "mysql", "mariadb", "servers", "embedded", "served"),
    *("postgres_ready", "mysql_ready", "postgres_url", "mysql_url"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    wider = {os.environ.get(f"POSTROOM_TEST_{name}") for name in ("MATRIX", "STORES", "ENDPOINTS")}
    parser.addoption(
        "--matrix",
        choices=["one", "all"],
        default="all" if "all" in wider else "one",
        help="where tests run that can run on several stores and endpoints: at one place each, or at all",
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    if [config.rootpath / arg for arg in config.args] == [config.rootpath / "tests"]:
        config.stash[WHOLE] = list(items)
    yield
    _leave_one_place(config, items)


def _leave_one_place(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Whoever names a place gets it: `-k postgres` was heeded before, and so is a test's whole name."""
    if config.getoption("--matrix") == "all" or any("[" in arg for arg in config.args):
        return
    kept = in_default_run(items)
    left_out = [item for item in items if item not in kept]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item in kept]


def in_default_run(items: list[pytest.Item]) -> set[pytest.Item]:
    """Slow ones too: `-m` decides on those."""
    kept, choices = set[pytest.Item](), defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if not _is_left_to_others(item):
            choices[_without_place(item)].append(item)
    for name, choice in choices.items():
        kept.add(choice[_hash(name) % len(choice)])
    return kept - _more_than_few(kept)


def _more_than_few(items: set[pytest.Item]) -> set[pytest.Item]:
    parameters = defaultdict[tuple[str, int], list[pytest.Item]](list)
    for item in items:
        if (marker := item.get_closest_marker("few")) is not None:
            parameters[item.nodeid.partition("[")[0], marker.args[0]].append(item)
    return {
        item
        for (_, count), found in parameters.items()
        for item in sorted(found, key=lambda item: _hash(item.nodeid))[count:]
    }


def _hash(name: str) -> int:
    return zlib.crc32(name.encode())


def function_of(item: pytest.Item) -> str:
    """The same for all its parameters, and for all classes that inherit it."""
    function = item.function  # type: ignore[attr-defined]
    return f"{function.__module__}.{function.__qualname__}"


def reason_to_wait(item: pytest.Item) -> str | None:
    """Why it is not in the default run. Empty: somebody forgot to say."""
    marker = item.get_closest_marker("slow")
    return None if marker is None else " ".join(map(str, marker.args))


def _is_left_to_others(item: pytest.Item) -> bool:
    marker = item.get_closest_marker("parts")
    return marker is not None and _part(item) not in (*marker.args, *marker.kwargs.get("in_turn", ()))


def _part(item: pytest.Item) -> str:
    """Of the store contract: the module that has the test."""
    module: str = item.function.__module__  # type: ignore[attr-defined]
    return module.rpartition(".")[2]


def _without_place(item: pytest.Item) -> str:
    """The same for all places of a test with the same other parameters."""
    spec = getattr(item, "callspec", None)
    if (marker := item.get_closest_marker("parts")) and _part(item) in marker.kwargs.get("in_turn", ()):
        return f"{function_of(item)}[{spec.id if spec else ''}]"
    if spec is None:
        return item.nodeid
    named = [value for name, value in spec.params.items() if name in ARGUMENTS]
    places = [value for value in named if isinstance(value, str) and value in VALUES]
    rest = f"-{spec.id}-"
    for place in places:
        rest = rest.replace(f"-{place}-", "-", 1)
    return f"{item.nodeid.partition('[')[0]}[{rest}]" if places else item.nodeid
