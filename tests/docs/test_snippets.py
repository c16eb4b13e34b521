"""Every example in README.md and docs/ does what it shows.

The blocks of a page run in order, in one namespace and one fresh directory with its own queue
(`POSTROOM_URL`): a SQLite file, or on the pages about a database server an empty database. What a fence may
say is in `pages`, how `# -> value` is compared in `shown`.
"""

from __future__ import annotations

import ast
import asyncio
import doctest
import inspect
import io
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from celery import Celery

import postroom
from postroom.cli.root import run
from tests.docs.pages import PAGES, Block, blocks, page_id
from tests.docs.shown import Shown

PAGE_SECONDS = 110
COMMAND_SECONDS = 30
SERVERS = {
    "docs/howto/postgresql.md": "spare_postgres",
    "docs/howto/mysql.md": "spare_mariadb",
}  # durable ones
_EXIT = re.compile(r"#\s*exit (\d+)\s*$")
_COMMENT = re.compile(r"\s#.*$")
_QUOTED = re.compile(r"'[^']*'|\"[^\"$`\\\\]*\"")
_SHELL = re.compile(r"[|&;<>$`()~*?{}\[\]\\\\]")
_LOOSE = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def _param(page: Path) -> Any:
    """Pages about Spark take longer; they share a session with its tests (`tests.sharing`)."""
    seconds = 3 * PAGE_SECONDS if "spark" in page.name else PAGE_SECONDS
    return pytest.param(page, id=page_id(page), marks=pytest.mark.timeout(seconds))


TUTORIAL = [page for page in PAGES if page.parent.name == "tutorial"]


@pytest.mark.slow("starts programs")
@pytest.mark.usefixtures("fresh_directory")
@pytest.mark.timeout(3 * PAGE_SECONDS)
def test_the_tutorial_does_what_it_shows_from_its_first_part_to_its_last() -> None:
    assert [page.name[0] for page in TUTORIAL] == ["1", "2", "3", "4"]
    run_page([block for page in TUTORIAL for block in blocks(page)])


@pytest.mark.few(12, "each starts programs")
@pytest.mark.usefixtures("fresh_directory")
@pytest.mark.parametrize("page", [_param(page) for page in PAGES if page not in TUTORIAL])
def test_a_page_does_what_it_shows(
    page: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if page_id(page) in SERVERS:
        server = request.getfixturevalue(SERVERS[page_id(page)])
        monkeypatch.setenv("POSTROOM_URL", server.url(server.create_database()))
    run_page(blocks(page))


@pytest.fixture
def fresh_directory(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """The working directory, with a queue of its own; modules imported from it are forgotten afterwards."""
    folder = tmp_path_factory.mktemp("page")  # kept for the run: a Spark that a page starts stays in it
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("POSTROOM_URL", "sqlite:///queue.db")
    yield folder
    for name, module in list(sys.modules.items()):
        if Path(getattr(module, "__file__", None) or "/").is_relative_to(folder):
            del sys.modules[name]


def run_page(found: list[Block]) -> None:
    shown = Shown()
    names: dict[str, Any] = {"__name__": "__page__", **shown.names()}
    with asyncio.Runner() as runner:
        for block in found:
            if block.language == "python":
                run_python(block, shown, names, runner)
            elif block.language == "console" and block.run:
                run_console(block)
        for left in names.values():  # a page need not show how it ends
            if isinstance(left, postroom.Connection):
                runner.run(left.close())
            elif isinstance(left, Celery):
                left.pool.force_close_all()
                left.close()
    shown.assert_all_reached()


def run_python(block: Block, shown: Shown, names: dict[str, Any], runner: asyncio.Runner) -> None:
    """Outside a loop unless it awaits, so that `asyncio.run` and `postroom.sync` work as in a program."""
    if block.file is not None:
        with Path(block.file).open("r+" if block.added else "w", encoding="utf-8") as file:  # r+: it is there
            file.seek(0, os.SEEK_END)
            file.write(block.text)
    if not block.run:
        compile(block.text, str(block), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        return
    code = shown.compile(block.text, page_id(block.page), block.line)
    if code.co_flags & inspect.CO_COROUTINE:
        runner.run(_awaited(code, names))
    else:
        exec(code, names)


async def _awaited(code: Any, names: dict[str, Any]) -> None:
    await eval(code, names)


def run_console(block: Block) -> None:
    for command, output in commands(block.text):
        note = _EXIT.search(command)
        expected = int(note[1]) if note else 0
        code, got = run_command(command, output)
        said = f"{block}: $ {command}\n{got}"
        assert code == expected, f"exit {code}, not {expected}: {said}"
        assert shows(output, got), f"the page shows\n{output}\nbut {said}"


def shows(output: str, got: str) -> bool:
    """Whether it is what the page shows; if that is nothing, it may be anything."""
    wanted = output.strip().replace("…", "...")
    return not wanted or doctest.OutputChecker().check_output(f"{wanted}\n", got, _LOOSE)


def run_command(command: str, output: str) -> tuple[int, str]:
    words = words_of(command)
    if words is not None and words[0] == "postroom":
        return run_here(words[1:])
    if words is not None and words[0] == "timeout" and output.strip():
        return run_until_shown(words, output)
    return run_in_shell(command)


def words_of(command: str) -> list[str] | None:
    """Of a command that needs nothing of a shell; else None."""
    if _SHELL.search(_QUOTED.sub("", _COMMENT.sub("", command))):
        return None
    return shlex.split(command, comments=True)


def run_here(words: list[str]) -> tuple[int, str]:
    """In this process: to start one takes longer than most commands."""
    said = io.BytesIO()
    both = io.TextIOWrapper(said, encoding="utf-8", write_through=True)  # as on a terminal
    with patch.dict(os.environ, environment()), redirect_stdout(both), redirect_stderr(both):
        code = run(words)
    return code, said.getvalue().decode()


def run_until_shown(words: list[str], output: str) -> tuple[int, str]:
    """What `timeout` would interrupt later is interrupted when it has said all but the last line shown."""
    *before, _ = output.strip().splitlines()
    said, told = "", False
    seconds = next(word for word in words if word.isdecimal())  # enough for a reader, not for a busy machine
    words = [str(PAGE_SECONDS) if word is seconds else word for word in words]
    env = {**environment(), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env) as ran:
        assert ran.stdout is not None
        for line in ran.stdout:
            said += line
            if not told and shows("\n".join(before), said):
                ran.send_signal(signal.SIGINT)  # which `timeout` hands on
                told = True
    code = ran.returncode
    return code if code >= 0 else 128 - code, said  # as a shell tells it


def run_in_shell(command: str) -> tuple[int, str]:
    ran = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,  # as on a terminal
        text=True,
        timeout=COMMAND_SECONDS,
        env=environment(),
        check=False,
    )
    return ran.returncode, ran.stdout


def environment() -> dict[str, str]:
    """The tools of this environment first, and output that does not depend on the terminal."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    return {**os.environ, "PATH": path, "COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}


def commands(text: str) -> Iterator[tuple[str, str]]:
    """Commands and the output shown below each; a trailing backslash continues a command."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, output = re.sub(r"\\\n\s*", "", part).partition("\n")
        yield command, output


# --- the runner itself notices -----------------------------------------------------------------------


def page_of(root: Path, text: str) -> list[Block]:
    path = root / "page.md"
    path.write_text(text, encoding="utf-8")
    return [Block(PAGES[0], b.line, b.language, b.text, b.run, b.file, b.added) for b in blocks(path)]


@pytest.mark.parametrize(
    "text",
    [
        "```python\n1 + 1  # -> 2\n```",
        "```python\nx = 'a'  # -> 'a'\n```\n```python\nprint(x, 2)  # -> a 2\n```",
        "```python\nimport asyncio\nawait asyncio.sleep(0, 'done')  # -> 'done'\n```",
        "```python\nimport asyncio\n\nasync def f():\n    3  # -> 3\n\nasyncio.run(f())\n```",
        "```python\nlist(range(50))  # -> [0, 1, ..., 49]\n```",
        "```python no-run\nawait nothing_of_the_kind\n```",
        "```python file=mine.py\nvalue = 7\n```\n```python\nfrom mine import value\nvalue  # -> 7\n```",
        "```python file=a.py\nx = 1\n```\n```python append=a.py\nx += 1\n```\n"
        "```python\nimport a\na.x  # -> 2\n```",
        "```console\n$ echo one; echo two\none\n…\n$ false  # exit 1\n```",
        "```console\n$ timeout 60 python -c 'import time; print(1); time.sleep(99)'  # exit 130\n1\n…\n```",
        "```console no-run\n$ exit 9\n```",
        "```\nnot python\n```",
    ],
)
def test_a_true_page_passes(fresh_directory: Path, text: str) -> None:
    run_page(page_of(fresh_directory, text))


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("postroom lag orders 'a b' --json  # exit 3", ["postroom", "lag", "orders", "a b", "--json"]),
        ("postroom send orders '{\"a\": 1}'", ["postroom", "send", "orders", '{"a": 1}']),
        ("postroom lag orders | head", None),
        ("postroom lag orders && true", None),
        ('postroom send orders "$HOME"', None),
        ("postroom send orders < file", None),
    ],
)
def test_what_needs_a_shell_gets_one(command: str, words: list[str] | None) -> None:
    assert words_of(command) == words


@pytest.mark.usefixtures("fresh_directory")
@pytest.mark.parametrize("value", [7, 8])
def test_pages_may_have_files_of_the_same_name(tmp_path: Path, value: int) -> None:
    text = f"```python file=mine.py\nx = {value}\n```\n```python\nimport mine\nmine.x  # -> {value}\n```"
    run_page(page_of(tmp_path, text))


@pytest.mark.parametrize(
    "text",
    [
        "```python\n1 + 1  # -> 3\n```",
        "```python\nif False:\n    1  # -> 1\n```",
        "```python\nx, y = 1, 2  # -> (1, 2)\n```",
        "```python\nassert False\n```",
        "```python no-run\nthis is no python\n```",
        "```python sometimes\n1\n```",
        "```python append=not-there.py\n1\n```",
        "```console\n$ false\n```",
        "```console\n$ true  # exit 2\n```",
        "```console\n$ echo one\ntwo\n```",
        "```console\n$ timeout 60 echo one\ntwo\nthree\n```",
    ],
)
def test_an_untrue_page_fails(fresh_directory: Path, text: str) -> None:
    with pytest.raises((AssertionError, SyntaxError, ValueError, FileNotFoundError)):
        run_page(page_of(fresh_directory, text))
