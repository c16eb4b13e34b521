"""Which tests run in the same process, one after the other.

Those that share a Spark session, which takes seconds to start; and those of chaos, each of which is many
processes: several at once would be a test of an overloaded machine, where leases end for want of a processor.

With `--dist loadgroup` they are one unit of work. xdist's own mark for that (`xdist_group`) does nothing with
pytest 9.2, which does not look at the name that xdist 3.8 gives a test; so the path decides.
"""

from __future__ import annotations

from typing import Any

import pytest

__all__ = ["unit_of"]

_SPARK = "tests/integration/spark/"
_WITHOUT_JVM = f"{_SPARK}test_readers.py"
_TIERS = "tests/unit/repository/test_tiers.py"  # they share what was collected, which takes seconds
_PAGES = "tests/docs/test_snippets.py::test_a_page_does_what_it_shows[docs/howto/spark"


def unit_of(nodeid: str) -> str:
    if nodeid.startswith("tests/chaos/"):
        return "chaos"
    if nodeid.startswith(_TIERS):
        return "tiers"
    in_session = nodeid.startswith(_SPARK) and not nodeid.startswith(_WITHOUT_JVM)
    return "spark" if in_session or nodeid.startswith(_PAGES) else nodeid


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if unit_of(item.nodeid) == "spark":
            item.add_marker(pytest.mark.spark)
            item.add_marker(pytest.mark.slow("needs Spark: make test-spark"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler.loadgroup import LoadGroupScheduling

    class Sharing(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

    return Sharing(config, log)
