"""The hook of `make docs`: makes a site of pages that are written to be read on their own, too.

Decides three things. The parts of the site are the headings of docs/index.md, and their pages the links
below them, so that there is one list and not two. What stands behind ```python is for the tests and is not
shown; a file's name becomes its title. What lies outside of docs/ (examples, ARCHITECTURE.md) is named, not
linked. The reference of the API and of the command line is made from the code as it is. Must never change a
page on the disk.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from tools.docs.reference import pages

__all__ = ["on_config", "on_files", "on_page_markdown", "parts"]

_HEADING = re.compile(r"^## (?P<title>.+)$")
_LINK = re.compile(r"(?<!!)\[(?P<title>[^\]]+)\]\((?P<path>[^)#\s]+\.md)\)")
_OUTSIDE = re.compile(r"\[(?P<title>[^\]]+)\]\((?P<path>(?:\.\./)+[^)\s]+)\)")
_FENCE = re.compile(r"^```(?P<language>python|console)[ ](?P<words>[^\n]+)$", re.MULTILINE)
REFERENCE = "Reference"


def parts(index: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """The parts of the documentation and their pages, each once, as (title, path)."""
    found: list[tuple[str, list[tuple[str, str]]]] = []
    seen = {"index.md"}
    for line in index.splitlines():
        heading = _HEADING.match(line)
        if heading:
            found.append((heading["title"], []))
        elif found:
            for link in _LINK.finditer(line):
                if not link["path"].startswith("../") and link["path"] not in seen:
                    seen.add(link["path"])
                    title = link["title"].replace("`", "")
                    found[-1][1].append((title[:1].upper() + title[1:], link["path"]))
    return found


def on_config(config: Any) -> Any:
    index = (Path(config["docs_dir"]) / "index.md").read_text(encoding="utf-8")
    nav: list[dict[str, Any]] = [{"Postroom": "index.md"}]
    for title, listed in parts(index):
        entries = [{name: path} for name, path in listed]
        if title == REFERENCE:
            entries = [{page.title: page.path} for page in pages()] + entries
        nav.append({title: entries})
    config["nav"] = nav
    return config


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for page in pages():
        files.append(File.generated(config, page.path, content=page.text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    folder = posixpath.dirname(page.file.src_uri)
    return _OUTSIDE.sub(lambda link: _inside(link, folder), _FENCE.sub(_plain, markdown))


def _plain(fence: re.Match[str]) -> str:
    named = [word.removeprefix("file=") for word in fence["words"].split() if word.startswith("file=")]
    return f"```{fence['language']}" + "".join(f' title="{name}"' for name in named)


def _inside(link: re.Match[str], folder: str) -> str:
    """The link if it stays in docs/, else what it names."""
    target = posixpath.normpath(posixpath.join(folder, link["path"]))
    if not target.startswith("../"):
        return link[0]
    path = target.removeprefix("../").partition("#")[0]
    return f"`{path}`" if link["title"] == path else f"{link['title']} (`{path}` in a checkout)"
