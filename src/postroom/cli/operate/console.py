"""`postroom console`: the web console of any queue, also of a file that nobody serves.

For a database the console is served by this command, on this machine only and for as long as it runs. Whoever
may read the file may do everything, so the address that is printed has a key in it: other users of this
machine do not know it, and it works once. A broker has a console of its own: its address is said and opened.

Must never create a queue: a mistyped URL leaves nothing behind.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Annotated, Any

import typer

from ...errors import UsageError
from ..framework import exits, show
from ..framework.command import Run
from .serve import on_signals

__all__ = ["console"]

_HTTP_PORT = 7071  # of a broker that was not told another


async def console(
    run: Run,
    queue: Annotated[
        str | None, typer.Argument(metavar="URL", help="The queue; the same as --url.", show_default=False)
    ] = None,
    port: Annotated[int, typer.Option(help="Where to listen on this machine; 0 is any that is free.")] = 0,
    http_port: Annotated[
        int, typer.Option("--http-port", help="Of the broker, if the queue is a served one.")
    ] = _HTTP_PORT,
    https: Annotated[bool, typer.Option("--https", help="The broker speaks TLS.")] = False,
    browse: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open it in a browser, or only say where it is.")
    ] = True,
) -> None:
    """Open the web console: see the queue and steer it, until Ctrl-C."""
    if queue and run.named and queue != run.url:
        raise UsageError("the queue was named twice: leave out --url")
    run = replace(run, url=queue, chosen=True) if queue else run
    if run.address.kind == "postroom":
        host = run.address.brokers[0].rpartition(":")[0]
        _open(run, f"{'https' if https else 'http'}://{host}:{http_port}/console", browse=browse)
        return
    run.refuse_missing()
    await _serve(run, port, browse=browse)


async def _serve(run: Run, port: int, *, browse: bool) -> None:
    import asyncio

    from ...address import parse_shards
    from ...broker.access import Gatekeeper
    from ...broker.broker import open_endpoint
    from ...broker.served import measured
    from ...clock import SystemClock
    from ...http.app import make_app  # first: it says what to install where the extra `server` is missing
    from ...http.server import serve_http  # isort: split
    from ...console.pages import add_console

    key, told = secrets.token_urlsafe(16), asyncio.Event()
    broker = measured(await open_endpoint(run.address, shards=parse_shards(run.shards)))
    try:
        app = make_app(broker, Gatekeeper(broker.store, broker.in_thread, SystemClock()))
        add_console(app, key=key)
        server = await serve_http(app, "127.0.0.1", port)
        try:
            on_signals(told.set)
            _open(run, f"http://127.0.0.1:{server.port}/console#key={key}", browse=browse)
            await told.wait()
        finally:
            await server.stop(1)
    finally:
        await broker.close()


def _open(run: Run, url: str, *, browse: bool) -> None:
    if run.json:
        show.json_line({"console": url})
    else:
        typer.echo(f"The console of {run.shown}: {url}")
    if browse and not _opened(url):
        exits.say_note("no browser was found here: open the address yourself")


def _opened(url: str) -> Any:
    import webbrowser

    try:
        return webbrowser.open(url)
    except webbrowser.Error:
        return False
