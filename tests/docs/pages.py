"""The documentation as data: pages, fenced blocks, tables, links and code spans.

Decides what counts as a runnable block:

    ```python              runs, in the page's namespace; top-level `await` is allowed
    ```python no-run       is only compiled
    ```python file=app.py  is written to that file, and compiled
    ```python append=a.py  is added to that file's end, and compiled
    ```console             lines that start with `$ ` run in a shell; the lines below are their output
    ```console no-run      is not run

Must never skip a fence it does not understand: an unknown word behind `python` or `console` is an error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PAGES", "ROOT", "Block", "blocks", "code_spans", "headings", "links", "page_id", "prose", "table"]

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<text>.*?)^```[ ]*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_SPAN = re.compile(r"`([^`\n]+)`")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_CELL = re.compile(r"(?<!\\)\|")


@dataclass(frozen=True)
class Block:
    page: Path
    line: int  # of its first line of text
    language: str
    text: str
    run: bool
    file: str | None
    added: bool = False  # to a file that is there

    def __str__(self) -> str:
        return f"{page_id(self.page)}:{self.line}"


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [_block(page, text, found) for found in _FENCE.finditer(text)]


def _block(page: Path, text: str, found: re.Match[str]) -> Block:
    language, *words = found["info"].split() or [""]
    line = text.count("\n", 0, found.start("text")) + 1
    run, file, added = True, None, False
    for word in words:
        if word == "no-run":
            run = False
        elif word.startswith("file=") and language == "python":
            run, file = False, word.removeprefix("file=")
        elif word.startswith("append=") and language == "python":
            run, file, added = False, word.removeprefix("append="), True
        else:
            raise ValueError(f"{page_id(page)}:{line}: what is {word!r} behind ```{language}?")
    return Block(page, line, language, found["text"], run, file, added)


def prose(page: Path) -> str:
    """The page without its fenced blocks; line numbers stay as they are."""
    text = page.read_text(encoding="utf-8")
    return _FENCE.sub(lambda found: "\n" * found[0].count("\n"), text)


def links(page: Path) -> list[str]:
    return _LINK.findall(_SPAN.sub("", prose(page)))


def code_spans(page: Path) -> list[str]:
    return _SPAN.findall(prose(page))


def headings(page: Path) -> set[str]:
    """Anchors, as GitHub makes them."""
    found = set()
    for title in _HEADING.findall(prose(page)):
        plain = re.sub(r"[^\w\- ]", "", title.lower())
        found.add(plain.strip().replace(" ", "-"))
    return found


def table(page: Path, heading: str) -> list[list[str]]:
    """The rows of the first table under a heading; its title row and the rule are left out."""
    text = prose(page)
    start = re.search(rf"^#+ {re.escape(heading)}$", text, re.MULTILINE)
    assert start is not None, f"{page_id(page)} has no heading {heading!r}"
    rows: list[list[str]] = []
    for line in text[start.end() :].splitlines():
        if line.startswith("|"):
            rows.append([cell.strip().replace("\\|", "|") for cell in _CELL.split(line)[1:-1]])
        elif rows:
            break
    assert len(rows) > 2, f"{page_id(page)} has no table under {heading!r}"
    return rows[2:]
