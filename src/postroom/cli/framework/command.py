"""Every command has `--url`, `--shard`, `--json`, `--debug`, a `Run`, and errors as exit codes.

Decides which queue a command works on, with which shards, and whether it may make their files. Must never
create a file for a command that only looks or that needs what is not there: a mistyped URL leaves nothing
behind.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from ...errors import PostroomError, StoreUnavailable
from . import exits

if TYPE_CHECKING:
    from postroom import Connection

    from ...address import Address

__all__ = ["DEFAULT_URL", "Run", "command", "family", "run_loop", "shard_text", "shard_urls"]


def shard_urls(options: Iterable[str], environment: str) -> dict[str, str]:
    """Return the databases that a queue has beside its first one: `--shard NAME=URL`, and POSTROOM_SHARDS.

    An option beats what the environment says of the same name. An error never shows what was written: there
    may be a password in it.

    >>> shard_urls(["b=sqlite:///b2.db"], "b=sqlite:///b.db, c=postgresql://host/queue")
    {'b': 'sqlite:///b2.db', 'c': 'postgresql://host/queue'}
    """
    from ...address import named_urls, shards_named

    found = shards_named(environment, "POSTROOM_SHARDS")
    return found | named_urls(
        list(options), "--shard", "write a name and a URL, such as --shard b=mysql://host/queue"
    )


def shard_text(urls: Mapping[str, str]) -> str:
    """Return the shards as POSTROOM_SHARDS has them."""
    return ",".join(f"{name}={url.replace(',', '%2C')}" for name, url in urls.items())


DEFAULT_URL = "sqlite:///postroom.db"
_SHARED = "Options of every command"

Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        "-u",
        metavar="URL",
        help="The queue to work on. Default: POSTROOM_URL, else postroom.db in this folder.",
        show_default=False,
        rich_help_panel=_SHARED,
    ),
]
Shard = Annotated[
    list[str] | None,
    typer.Option(
        "--shard",
        metavar="NAME=URL",
        help="One more database of the queue; several times for several. Default: POSTROOM_SHARDS.",
        show_default=False,
        rich_help_panel=_SHARED,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="JSON for scripts; errors too.", rich_help_panel=_SHARED)]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.", rich_help_panel=_SHARED)]

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Run:
    """One call of one command: what was asked for by the options all of them have."""

    url: str
    chosen: bool  # by option or environment; else it is the default
    named: bool  # by option
    json: bool
    debug: bool
    shards: Mapping[str, str] = field(default_factory=dict)  # URLs by name, without the first

    @asynccontextmanager
    async def connect(
        self, *, create: bool = False, create_shards: bool = False
    ) -> AsyncIterator[Connection]:
        """Open the queue. A file that is not there is an error, unless the command may create it."""
        import postroom

        path = self.address.path
        missing = path is not None and not path.exists()
        if not create:
            self.refuse_missing(shards=not create_shards)
        async with postroom.connect(self.url, shards=self.shards or None) as mq:
            if missing:
                why = "" if self.chosen else " (name another with --url or POSTROOM_URL)"
                exits.say_note(f"created the queue {path}{why}")
            yield mq

    def databases(self) -> list[Run]:
        """Return a run for each database alone, the first one first: some things are done one by one."""
        return [replace(self, url=url, chosen=True, shards={}) for url in (self.url, *self.shards.values())]

    @property
    def address(self) -> Address:
        """The parsed URL."""
        from ...address import parse

        return parse(self.url)

    @property
    def shown(self) -> str:
        """The URL for people and logs: without its password."""
        return self.address.shown or self.url

    def nothing_here(self) -> StoreUnavailable:
        where = "" if self.chosen else f" in {Path.cwd()}"
        return StoreUnavailable(
            f"there is no queue {self.address.path}{where}: make one with `postroom topic create NAME`, "
            "or name another with --url or POSTROOM_URL"
        )

    def refuse_missing(self, *, shards: bool = True) -> None:
        """Raise StoreUnavailable if a file of the queue is not there; with `shards` also one of theirs."""
        from ...address import parse_shards

        path = self.address.path
        if path is not None and not path.exists():
            raise self.nothing_here()
        for name, address in parse_shards(self.shards).items():
            path = address.path
            if shards and path is not None and not path.exists():
                raise StoreUnavailable(
                    f"there is no file {path} for shard {name!r}: correct its address; a new shard is "
                    "made by `postroom topic create` or `postroom route move`"
                )


def family(name: str, help: str) -> typer.Typer:
    """Make a command with commands below it, such as `postroom topic …`."""
    app = typer.Typer(name=name, help=help, no_args_is_help=True)

    @app.callback()
    def options(
        ctx: typer.Context, url: Url = None, shard: Shard = None, as_json: Json = False, debug: Debug = False
    ) -> None:
        note_options(ctx, url, shard, as_json, debug)

    return app


def note_options(
    ctx: typer.Context, url: str | None, shard: Sequence[str] | None, as_json: bool, debug: bool
) -> None:
    """Note the shared options, which may stand after any word: the last URL counts, others add up."""
    before: dict[str, Any] = ctx.obj if isinstance(ctx.obj, dict) else {}
    ctx.obj = {
        **before,
        "url": url or before.get("url"),
        "shards": [*before.get("shards", ()), *(shard or ())],
        "json": as_json or before.get("json", False),
        "debug": debug or before.get("debug", False),
    }


def command(app: typer.Typer, name: str, **settings: Any) -> Callable[[F], F]:
    """Make a function a command: it gets a `Run` first; a coroutine function is run in a loop."""

    def register(function: F) -> F:
        app.command(name, **settings)(_framed(function))
        return function

    return register


def _framed(function: Callable[..., Any]) -> Callable[..., None]:
    @wraps(function)
    def framed(
        ctx: typer.Context,
        url: str | None,
        shard: list[str] | None,
        as_json: bool,
        debug: bool,
        **values: Any,
    ) -> None:
        note_options(ctx, url, shard, as_json, debug)
        code = exits.OK
        try:
            _call(function, _run(ctx.obj), values)
        except (PostroomError, exits.AbortedError, ExceptionGroup) as error:
            if ctx.obj["debug"]:
                raise
            code = exits.say_failure(error, as_json=ctx.obj["json"])
        except BrokenPipeError:
            code = exits.leave_closed_pipe()
        if code != exits.OK:
            raise typer.Exit(code)

    _set_signature(framed, function)
    return framed


def _call(function: Callable[..., Any], run: Run, values: dict[str, Any]) -> None:
    import sys

    from ...endpoint.asker import asked_by, this_user

    with asked_by(this_user("cli")):
        result = function(run, **values)
        if inspect.iscoroutine(result):
            run_loop(result)
    sys.stdout.flush()  # a closed pipe is noticed here, not at the interpreter's end


def run_loop(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end; Ctrl-C ends it quietly."""
    import asyncio

    def unless_interrupted(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not isinstance(context.get("exception"), KeyboardInterrupt):
            loop.default_exception_handler(context)

    with asyncio.Runner() as runner:
        runner.get_loop().set_exception_handler(unless_interrupted)  # a second Ctrl-C ends quietly too
        runner.run(work)


def _set_signature(framed: Callable[..., None], function: Callable[..., Any]) -> None:
    """Give it the signature that Typer reads: the function's own without `run`, and the shared options."""
    own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
    keyword = inspect.Parameter.KEYWORD_ONLY
    shared = [
        inspect.Parameter("ctx", keyword, annotation=typer.Context),
        *(p.replace(kind=keyword) for p in own),
        inspect.Parameter("url", keyword, annotation=Url, default=None),
        inspect.Parameter("shard", keyword, annotation=Shard, default=None),
        inspect.Parameter("as_json", keyword, annotation=Json, default=False),
        inspect.Parameter("debug", keyword, annotation=Debug, default=False),
    ]
    framed.__signature__ = inspect.Signature(shared)  # type: ignore[attr-defined]
    framed.__annotations__ = {p.name: p.annotation for p in shared}


def _run(options: dict[str, Any]) -> Run:
    chosen = options["url"] or os.environ.get("POSTROOM_URL")
    return Run(
        url=chosen or DEFAULT_URL,
        chosen=bool(chosen),
        named=bool(options["url"]),
        json=options["json"],
        debug=options["debug"],
        shards=shard_urls(options["shards"], os.environ.get("POSTROOM_SHARDS", "")),
    )
