"""`make docs`: the site is built without a warning, asks nobody for anything, and has every page and name."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import postroom
from postroom import errors
from tests.docs.pages import PAGES, ROOT
from tests.docs.test_reference import command_names
from tools.docs import pictures, settings
from tools.docs.reference import GROUPS, MODULES, pages
from tools.docs.site import on_page_markdown, parts

INDEX = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
SECONDS = 110
PARTS = ["Start", "Tutorial", "How-to", "Coming from…", "Operate", "Pipeline (Spark)", "Reference"]


class Here:
    """What the hook is told of a page."""

    def __init__(self, path: str) -> None:
        self.file, self.src_uri = self, path


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        env={"PATH": "/usr/bin:/bin", "NO_MKDOCS_2_WARNING": "1", "http_proxy": "http://127.0.0.1:9"},
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    return folder


@pytest.mark.slow("builds the site")
@pytest.mark.timeout(SECONDS)
def test_the_site_is_built_without_a_warning_and_has_every_page(site: Path) -> None:
    docs = [page.relative_to(ROOT / "docs") for page in PAGES if page.is_relative_to(ROOT / "docs")]
    assert len(docs) > 70
    assert [page for page in docs if not (site / page.with_suffix(".html")).is_file()] == []


@pytest.mark.slow("builds the site")
@pytest.mark.timeout(SECONDS)
def test_a_reader_of_the_site_fetches_nothing_from_elsewhere(site: Path) -> None:
    fetched = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=[\"']?(https?:[^\"'\s>]+)")
    found = {url for page in site.rglob("*.html") for url in fetched.findall(page.read_text("utf-8"))}
    assert found == set()


def test_the_site_has_seven_parts_and_every_page_is_in_one() -> None:
    found = parts(INDEX)
    assert [title for title, _ in found] == PARTS and all(listed for _, listed in found)
    listed = {path for _, pages in found for _, path in pages}
    docs = {page.relative_to(ROOT / "docs").as_posix() for page in PAGES[1:]}
    assert docs - listed == {"index.md"}, "link these in docs/index.md, in their part"


def test_the_reference_has_every_public_name_once_and_every_command() -> None:
    text = "\n".join(page.text for page in pages())
    for name in set(postroom.__all__) - set(MODULES):
        if not hasattr(errors, name):  # those are in docs/errors.md
            assert len(re.findall(rf"^## {name}$", text, re.MULTILINE)) == 1, name
    assert set(GROUPS["Connection"]) <= set(postroom.__all__)
    for name in command_names():
        assert len(re.findall(rf"^##+ postroom {name}$", text, re.MULTILINE)) == 1, name
    assert " object at 0x" not in text and "._" not in text


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("```python file=shop.py\n1\n```", '```python title="shop.py"\n1\n```'),
        ("```console no-run\n$ ls\n```", "```console\n$ ls\n```"),
        ("```python\n1\n```", "```python\n1\n```"),
        ("[errors](../errors.md#all)", "[errors](../errors.md#all)"),
        ("[examples/shop](../../examples/shop)", "`examples/shop`"),
        ("[the shop](../../examples/shop)", "the shop (`examples/shop` in a checkout)"),
    ],
)
def test_a_page_is_shown_without_what_is_for_the_tests(written: str, shown: str) -> None:
    assert on_page_markdown(written, Here("howto/page.md")) == shown


def test_the_parts_are_the_headings_of_the_index_and_a_page_is_in_one_of_them() -> None:
    index = "[no](no.md)\n## A\n- [one](a.md), [`two`](b.md)\n## B\n[again](a.md) [up](../c.md) [at](d.md#x)"
    assert parts(index) == [("A", [("One", "a.md"), ("Two", "b.md")]), ("B", [])]


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_is_what_the_code_draws(name: str) -> None:
    assert (pictures.FOLDER / name).read_text("utf-8") == pictures.PICTURES[name]().svg(), (
        "run `make pictures`"
    )


def test_words_that_leave_a_picture_are_noticed() -> None:
    with pytest.raises(AssertionError, match="does not fit"):
        pictures.Picture("", 100, 100).box(pictures.Box(0, 0, "much too long for it", width=50))
    with pytest.raises(AssertionError, match="leaves the picture"):
        pictures.Picture("", 100, 100).words(80, 10, "much too long for it")


def test_the_page_of_settings_is_what_the_code_says() -> None:
    assert settings.PAGE.read_text("utf-8") == settings.text(), "run `make settings`"


def test_the_page_of_settings_has_every_variable_that_the_code_reads() -> None:
    read = {
        name
        for path in (ROOT / "src").rglob("*.py")
        for name in re.findall(r"[\"'](POSTROOM_[A-Z_]+[A-Z])[\"']", path.read_text("utf-8"))
    }
    page = settings.text()
    own = {"POSTROOM_DEMO_URL", "POSTROOM_WORKER_LINE", "POSTROOM_APP"}  # of our processes; of Django
    assert {name for name in read - own if f"`{name}`" not in page} == set() and "POSTROOM_URL" in read
