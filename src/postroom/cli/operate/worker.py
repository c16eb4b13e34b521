"""`postroom worker module:app`: run an application's handlers until it is told to stop.

The application may name its own queue. A `--url` or POSTROOM_URL, with its shards, is used in its stead, and
that is logged; they are in the environment while the application is imported. What handlers do wrong is
logged to stderr: as lines for people, or with `--log-format json` (or `--json`) as objects; tokens are cut
out of both. With `--processes` or `--reload` this process supervises others that run the same command, and
never imports the application itself.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..framework import show
from ..framework.command import Run, shard_text
from ..framework.log_lines import JsonLines, TextLines

if TYPE_CHECKING:
    from postroom import App

__all__ = ["spool", "worker"]

_LEVELS = ("debug", "info", "warning", "error")
_FORMATS = ("text", "json")


def worker(
    run: Run,
    app: Annotated[str, typer.Argument(metavar="MODULE:APP", help="The postroom.App, such as orders:app.")],
    create: Annotated[
        bool, typer.Option("--create", help="Create topics of the App that are missing.")
    ] = False,
    processes: Annotated[
        int, typer.Option(min=1, max=256, help="Run so many processes; those that end are started again.")
    ] = 1,
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, help="Messages that each handler takes at once, in each process."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Run this handler and no other; several times for several."),
    ] = None,
    http_port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="Answer /healthz, /readyz and /metrics there.", show_default=False
        ),
    ] = None,
    http_host: Annotated[
        str, typer.Option(help="Where to listen for them; 0.0.0.0: everywhere.")
    ] = "127.0.0.1",
    reload: Annotated[
        bool, typer.Option("--reload", help="For development: start again when a file here changes.")
    ] = False,
    log_level: Annotated[str, typer.Option(metavar="|".join(_LEVELS), help="What to log.")] = "info",
    log_format: Annotated[str, typer.Option(metavar="|".join(_FORMATS), help="How to log it.")] = "text",
) -> None:
    """Run the handlers of an App; modules of this folder can be imported. Ctrl-C lets handlers end."""
    _choice("--log-level", log_level, _LEVELS)
    _choice("--log-format", log_format, _FORMATS)
    _use_environment(run)
    _log_to_stderr(run, log_level, log_format)
    line = os.environ.pop("POSTROOM_WORKER_LINE", None)  # of a process that is supervised
    if line is None and (processes > 1 or reload):
        words = _words(run, app, create, concurrency, only or [], log_level, log_format)
        code = _supervise(words, processes, http_host, http_port, reload=reload)
        raise typer.Exit(code) if code else typer.Exit()
    _run_here(run, app, create, concurrency, only or [], line, http_host, http_port)


def _use_environment(run: Run) -> None:
    """For the application, which may read them, and for processes that are started here."""
    if run.chosen:
        os.environ["POSTROOM_URL"] = run.url
    if run.shards:
        os.environ["POSTROOM_SHARDS"] = shard_text(run.shards)


def _run_here(
    run: Run, target: str, create: bool, concurrency: int | None, only: list[str], line: str | None,
    http_host: str, http_port: int | None,
) -> None:  # fmt: skip
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    from ...client.app.program import load_app
    from ...client.app.program import run as run_app

    app = load_app(target)
    if run.chosen:
        app.use(run.url, shards=run.shards or None)
    watched = line is not None or http_port is not None
    app.configure(only=only, concurrency=concurrency, metrics=True if watched else None)
    beside = partial(_beside, line=line, http_host=http_host, http_port=http_port) if watched else None
    run_app(app, create=create, beside=beside)


@asynccontextmanager
async def _beside(
    app: App, *, line: str | None, http_host: str, http_port: int | None
) -> AsyncIterator[Callable[[], None]]:
    """The line to a supervisor, or the door for probes."""
    async with AsyncExitStack() as stack:
        if line is not None:
            from .worker_processes import with_line

            yield await stack.enter_async_context(with_line(int(line), app))
            return
        from .probes import Door

        await stack.enter_async_context(Door(_Alone(app), http_host, http_port or 0))
        yield lambda: None


class _Alone:
    """A worker of one process, as probes ask it."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def health(self) -> dict[str, Any]:
        return self._app.health().as_dict()

    async def text(self) -> str:
        return (await self._app.metrics()).text


# ---- several processes ----


def _words(
    run: Run, app: str, create: bool, concurrency: int | None, only: list[str], level: str, format: str
) -> list[str]:
    """What a process is started with. The queue is in the environment: there may be a password in it."""
    words = ["worker", app, "--log-level", level, "--log-format", format]
    words += ["--create"] if create else []
    words += ["--concurrency", str(concurrency)] if concurrency is not None else []
    words += [word for name in only for word in ("--only", name)]
    return [*words, *(["--json"] if run.json else []), *(["--debug"] if run.debug else [])]


def _supervise(
    words: list[str], processes: int, http_host: str, http_port: int | None, *, reload: bool
) -> int:
    import asyncio

    from .probes import Door
    from .worker_processes import Supervisor, command_of, python_files

    files = partial(python_files, Path.cwd()) if reload else None

    async def supervised() -> int:
        async with AsyncExitStack() as stack:
            supervisor = Supervisor(command_of(words), processes, files=files)
            if http_port is not None:
                await stack.enter_async_context(Door(supervisor, http_host, http_port))
            return await supervisor.run()

    return asyncio.run(supervised())


# ---- the log ----


def _choice(option: str, given: str, choices: tuple[str, ...]) -> None:
    if given not in choices:
        raise typer.BadParameter(f"{option} {given!r}: choose one of {', '.join(choices)}")


def _log_to_stderr(run: Run, level: str, format: str) -> None:
    """Unless the application has set up its own logging, which it may still do while it is imported."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if run.json or format == "json" else TextLines())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.getLogger("postroom").setLevel(logging.DEBUG if run.debug else level.upper())


# ---- `postroom spool FILE`: what waits in a spool on this machine, why, and which process has it ----
# Only looks.


def spool(
    run: Run,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The spool, such as orders.spool.")],
) -> None:
    """Show what waits in a spool: how much, since when, and what is in the way. The queue is not asked."""
    from ...client.forward.spool_file import look

    found = look(file.absolute())
    if run.json:
        show.json_line(
            {
                "file": str(file),
                "messages": found.messages,
                "bytes": found.bytes,
                "oldest_age_ms": found.oldest_age_ms,
                "owner": found.owner.pid if found.owner else None,
                "stuck": found.stuck,
                "troubles": {topic: trouble._asdict() for topic, trouble in found.troubles.items()},
            }
        )
        return
    from ...units import format_bytes

    out = show.console()
    out.print(f"the spool {file}", style="bold", markup=False)
    oldest = f", the oldest since {show.age(found.oldest_age_ms)}" if found.messages else ""
    out.print(f"  {found.messages:,} messages, {format_bytes(found.bytes)}{oldest}")
    out.print(
        f"  in use by {found.owner}" if found.owner else "  no process has it: nothing is forwarded now"
    )
    for topic, trouble in found.troubles.items():
        what = f"topic {topic}" if topic else "the queue"
        state = "stuck" if trouble.stuck else "waits"
        out.print(f"  {state}  {what}: {trouble.reason}", markup=False, soft_wrap=True)
