"""What the commands of `postroom pipeline` share: a session, progress on a terminal, and a table at the end.

Decides how a job is shown, and that its errors are sentences. What Spark itself says goes nowhere, unless
`--debug` asks for it. Must import neither Spark nor a job before a command runs.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...address import parse
from ..framework import show
from ..framework.command import Run

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["Master", "Memory", "queue_options", "spark_session", "stepping", "summary"]

Master = Annotated[
    str | None,
    typer.Option(
        "--master",
        metavar="URL",
        help="Where Spark runs, such as spark://host:7077. Default: this machine.",
        show_default=False,
    ),
]
Memory = Annotated[str, typer.Option("--memory", metavar="SIZE", help="For Spark's driver, such as 2g.")]


@contextmanager
def spark_session(
    run: Run, master: str | None = None, memory: str = "2g", config: Mapping[str, object] | None = None
) -> Iterator[Any]:
    """A session for one command. Whatever Spark raises comes out as an error of Postroom."""
    from postroom.spark import session

    from ...spark.jobs.failures import explained

    run.refuse_missing()
    theirs = _active()
    config = {**({} if run.debug else {"spark.log.level": "ERROR"}), **(config or {})}
    if not run.debug:
        logging.getLogger().addFilter(_worth_a_line)
    with _hushed(run.debug), _interrupts_kept() as interrupted:
        spark = theirs or session("postroom pipeline", master=master, memory=memory, config=config)
    try:
        if interrupted:
            raise KeyboardInterrupt
        with explained():
            yield spark
    finally:
        if theirs is None:
            with _hushed(run.debug), suppress(Exception):  # a signal to all processes has ended it already
                spark.stop()


def _active() -> Any:
    """The session of this process, where the command is called from a program that has one."""
    sql = sys.modules.get("pyspark.sql")
    return None if sql is None else sql.SparkSession.getActiveSession()


def queue_options(run: Run) -> dict[str, str]:
    """Return how the data source reaches the queue that the command works on."""
    options = {"url": run.url, **{f"url.{name}": url for name, url in run.shards.items()}}
    token = os.environ.get("POSTROOM_TOKEN")
    if token and parse(run.url).kind == "postroom":  # Spark may have been started without it
        options["token"] = token
    return options


@contextmanager
def stepping(run: Run, what: str) -> Iterator[Callable[[str], None]]:
    """A spinner with what is being done, on a terminal; the call changes the text."""
    if run.json or not sys.stderr.isatty():
        yield lambda text: None
        return
    with show.console(stderr=True).status(what) as status:
        yield status.update


def summary(title: str, rows: list[tuple[str, str | Text]]) -> None:
    """The table at the end of a job."""
    show.console().print(show.table(("what", "value"), rows, title=title))


def _worth_a_line(record: logging.LogRecord) -> bool:
    """Let all records pass but those of Ctrl-C: PySpark's connection to Java logs where it came."""
    return record.exc_info is None or record.exc_info[0] is not KeyboardInterrupt


@contextmanager
def _interrupts_kept() -> Iterator[list[int]]:
    """Ctrl-C waits until Spark has started: PySpark would leave a Java process behind that never ends."""
    kept: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield kept
        return
    before = signal.signal(signal.SIGINT, lambda number, _: kept.append(number))
    try:
        yield kept
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _hushed(debug: bool) -> Iterator[None]:
    """Processes that begin here, Spark's among them, have nowhere to write their warnings."""
    if debug:
        yield
        return
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
