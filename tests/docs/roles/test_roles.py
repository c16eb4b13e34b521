"""Five readers, each from the documentation alone: their pages, in the order in which they would read them.

A page runs from top to bottom as it is written, in a folder of its own, as its reader would try it. Spark's
own pages, which a data engineer reads next, are run by tests/docs/test_snippets.py in a session they share.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks, links
from tests.docs.test_snippets import fresh_directory, run_page

__all__ = ["fresh_directory"]

ROLES = {
    "a web developer who comes from Celery": (
        "docs/quickstart.md",
        "docs/coming-from/fastapi.md",
        "docs/coming-from/flask.md",
        "docs/coming-from/django.md",
        "docs/howto/tasks.md",
        "docs/howto/testing.md",
    ),
    "a Kafka engineer": (
        "docs/coming-from/kafka.md",
        "docs/glossary.md",
        "docs/howto/ordered.md",
        "docs/howto/reading-and-replay.md",
        "docs/howto/routes.md",
    ),
    "a platform engineer": (
        "docs/operations.md",
        "docs/settings.md",
        "docs/howto/backlog-and-monitoring.md",
        "docs/howto/security.md",
        "docs/howto/command-line.md",
    ),
    "a data engineer": (
        "docs/howto/example-logs-to-the-lake.md",
        "docs/howto/pipeline-audit.md",
    ),
    "somebody with three minutes": ("README.md", "docs/comparison.md"),
}


@pytest.mark.usefixtures("fresh_directory")
@pytest.mark.timeout(330)
@pytest.mark.slow("runs pages again that tests/docs/test_snippets.py runs one by one")
@pytest.mark.parametrize("role", ROLES)
def test_a_reader_gets_through_the_pages_as_they_are_written(
    role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, name in enumerate(ROLES[role]):
        folder = tmp_path / str(number)
        folder.mkdir()
        with monkeypatch.context() as here:
            here.chdir(folder)
            here.syspath_prepend(str(folder))
            run_page(blocks(ROOT / name))
        forget(folder)


def forget(folder: Path) -> None:
    for name, module in list(sys.modules.items()):
        if Path(getattr(module, "__file__", None) or "/").is_relative_to(folder):
            del sys.modules[name]


@pytest.mark.parametrize("role", ROLES)
def test_the_pages_of_a_reader_are_linked_where_they_start(role: str) -> None:
    start = {(ROOT / "docs" / link.partition("#")[0]).resolve() for link in links(ROOT / "docs" / "index.md")}
    start |= {(ROOT / link.partition("#")[0]).resolve() for link in links(ROOT / "README.md")}
    assert [name for name in ROLES[role] if name != "README.md" and ROOT / name not in start] == []
