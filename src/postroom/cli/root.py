"""`postroom` itself: the commands there are, the options before them, and the way out.

Must import nothing slow: only Typer and the modules that declare commands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from . import demo, pipeline
from .framework import exits
from .framework.command import Debug, Json, Shard, Url, command, note_options
from .messages import consume, dead, delayed, send, stopped
from .operate import backup, console, doctor, migrate, serve, worker
from .queue import access, audit_log, groups, lag, rate, route, schedule, shard, status, topics

__all__ = ["app", "run"]

_EPILOG = (
    "[bold]Exit codes[/bold]  0 done · 1 an error of Postroom · 2 wrong usage · "
    "3 a check did not hold (lag, migrate --check) · 4 not confirmed · 130 interrupted\n\n"
    "[bold]New here?[/bold]   [cyan]postroom demo[/cyan] shows what it does, in a minute"
)

app = typer.Typer(
    name="postroom",
    help="Postroom, a message queue for teams that already run a database and write Python.",
    epilog=_EPILOG,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

for family in (
    topics.app, groups.app, route.app, shard.app, dead.app, stopped.app, delayed.app, schedule.app,
    rate.app, access.app,
):  # fmt: skip
    app.add_typer(family, rich_help_panel="Topics, groups, routes, shards and dead letters")
app.add_typer(pipeline.app, rich_help_panel="The data pipeline")
_COMMANDS: dict[str, tuple[Callable[..., Any], ...]] = {  # by panel, as `postroom --help` shows them
    "Messages": (send.send, send.cancel, consume.consume, consume.read),
    "Running": (
        status.status, lag.lag, console.console, serve.serve, worker.worker, migrate.migrate,
        backup.backup, backup.restore, migrate.restored, doctor.doctor, worker.spool, demo.demo,
        audit_log.audit_log,
    ),
}  # fmt: skip
for _panel, _functions in _COMMANDS.items():
    for _function in _functions:
        command(app, _function.__name__.replace("_", "-"), rich_help_panel=_panel)(_function)


def _show_version(wanted: bool) -> None:
    if wanted:
        import postroom

        typer.echo(f"postroom {postroom.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    ctx: typer.Context,
    url: Url = None,
    shards: Shard = None,
    as_json: Json = False,
    debug: Debug = False,
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    note_options(ctx, url, shards, as_json, debug)


def run(arguments: Sequence[str]) -> int:
    """Run a command and return its exit code. Wrong usage is worded like every other error."""
    postroom = typer.main.get_command(app)
    try:
        code: Any = postroom.main(list(arguments), prog_name="postroom", standalone_mode=False)
    except typer.TyperException as error:
        return _wrong_usage(error, as_json="--json" in arguments)
    except typer.Abort:
        exits.say_error("aborted", "nothing was done", as_json="--json" in arguments)
        return exits.ABORTED
    except KeyboardInterrupt:
        return exits.INTERRUPTED
    return code if isinstance(code, int) else exits.OK


def _wrong_usage(error: typer.TyperException, *, as_json: bool) -> int:
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "postroom"
    message = error.format_message().rstrip(".")
    if not message:  # a family without a command: its help was shown
        return exits.USAGE
    exits.say_error("usage", f"{message} (see `{path} --help`)", as_json=as_json)
    return error.exit_code
