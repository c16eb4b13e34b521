"""Install lines name a checkout: there is no release, so on the package index Postroom is not to be found."""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from postroom.errors import how_to_install, how_to_update
from tests.docs.pages import PAGES, ROOT

EXTRAS = set(
    tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
)
READ = sorted(  # what is read, or printed by what is run
    {
        *PAGES,
        ROOT / "Makefile",
        *(ROOT / "docs" / "examples").iterdir(),
        *(
            path
            for folder in ("src", "bench", "examples")
            for path in (ROOT / folder).rglob("*")
            if path.is_file()
        ),
    }
)

_TOOL = r"\b(?:pip3?|pipx|uv|uv pip|uv tool|uvx|poetry|pdm|conda|mamba|rye)\s+(?:install|add|inject|run)\b"
_LINE = re.compile(rf"(?:{_TOOL}|\buvx\b)(?P<words>[^\n;&|`)#]*)")
_NAMED = re.compile(r"(?<![\w./@:-])postroom(?=[\s'\"\[<>=~!,.;)]|$)", re.IGNORECASE)
_WITH_EXTRA = re.compile(r"(?<![\w./])postroom\[[\w{]", re.IGNORECASE)
_OF_CHECKOUT = re.compile(r"pip install [^\n]*?'(?:\.|/src)\[([\w,-]+)\]'")


def from_the_index(text: str) -> list[str]:
    """What would ask the package index for Postroom."""
    joined = re.sub(r"\\\n\s*", " ", text)
    lines = [found[0] for found in _LINE.finditer(joined) if _NAMED.search(found["words"])]
    return lines + _WITH_EXTRA.findall(joined)


@functools.cache
def texts(path: Path) -> tuple[str, ...]:
    """The file; of Python its strings too, each in one piece."""
    return tuple(_texts(path))


def _texts(path: Path) -> Iterator[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return
    yield text
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                yield "".join(str(p.value) if isinstance(p, ast.Constant) else "{}" for p in node.values)


def test_no_install_line_goes_to_the_index() -> None:
    assert len(READ) > 400
    found = [
        (path.relative_to(ROOT), line) for path in READ for t in texts(path) for line in from_the_index(t)
    ]
    assert found == []


def test_the_extras_that_are_named_exist() -> None:
    named = {
        extra
        for path in READ
        for text in texts(path)
        for extras in _OF_CHECKOUT.findall(text)
        for extra in extras.split(",")
    }
    assert {"postgres", "mysql", "server", "otel", "spark", "spark-local"} <= named <= EXTRAS
    calls = {
        extra
        for path in (ROOT / "src").rglob("*.py")
        for extra in re.findall(r"how_to_install\(['\"]([\w-]+)['\"]\)", path.read_text(encoding="utf-8"))
    }
    assert {"server", "spark", "spark-local"} <= calls <= EXTRAS


def test_what_errors_say_names_a_checkout() -> None:
    assert how_to_install("mysql") == "run `pip install '.[mysql]'` in a checkout of Postroom"
    assert how_to_update() == "update your checkout of Postroom and run `pip install .` in it"
    assert from_the_index(f"{how_to_install('mysql')}; {how_to_update()}") == []


@pytest.mark.parametrize(
    "text",
    [
        "$ pip install postroom",
        "pip install 'postroom[postgres]'",
        "run pip install -U postroom, then go on",
        "python -m pip install --quiet \\\n    postroom==1.0",
        "/opt/x/bin/pip install 'Postroom>=1'",
        "uv add postroom",
        "uv pip install postroom",
        "pipx run postroom",
        "uvx postroom demo",
        "`pip install postroom`.",
        "it needs postroom[server]",
        "(pip install redis postroom)",
        "f\"pip install 'postroom[{extra}]'\"",
    ],
)
def test_a_line_that_goes_to_the_index_is_found(text: str) -> None:
    assert from_the_index(text) != []


@pytest.mark.parametrize(
    "text",
    [
        "pip install .",
        "pip install '.[postgres]'    # in a checkout of Postroom",
        "pip install -e '.[dev]'",
        "/opt/postroom/bin/pip install -c /src/constraints.txt '/src[server]'",
        "python3 -m venv /opt/postroom && /opt/postroom/bin/pip install '.[server]'",
        "pip install tzdata",
        "uv run postroom-bench",
        "postroom migrate; pip install venv-pack",
        "Install it, and postroom will find it",
    ],
)
def test_a_line_that_does_not_is_fine(text: str) -> None:
    assert from_the_index(text) == []


def test_strings_are_read_in_one_piece(tmp_path: Path) -> None:
    path = tmp_path / "one.py"
    path.write_text('raise Error(\n    f"install it: pip install "\n    f"\'postroom[{extra}]\'"\n)\n')
    assert any(from_the_index(text) for text in list(texts(path))[1:])
