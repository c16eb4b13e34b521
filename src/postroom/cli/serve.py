"""`postroom serve`: a broker that others connect to, until it is told to stop.

Decides the order of things. Start: settings, the store, the ports, the first token. Stop, at the first SIGINT
or SIGTERM: no new connections, requests under way end within the grace, the broker leaves the list, the store
is closed; exit code 0. At the second signal the process ends at once, which costs nothing but redelivery.
SIGHUP: the settings are read again, and shards that are new there are used from then on.

The first token goes to stdout, once. Must never log it.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields as fields_of
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InvalidURL, PrincipalExists, UsageError
from ..serve_settings import ServeSettings, key_of, read_settings
from . import exits, show
from .frame import Run, command

if TYPE_CHECKING:
    import asyncio

    from fastapi import FastAPI

    from ..broker.embedded import Broker
    from ..broker.gatekeeper import Gatekeeper
    from ..http.server import HttpServer
    from ..wire.listening import Listening
    from ..wire.server import WireServer
    from .serve_shards import NewShards

__all__ = ["listening", "make_http", "register", "say_serving", "show_first_token", "start_http"]

log = logging.getLogger("postroom.serve")

_STORES = ("sqlite", "memory", "postgresql", "mysql")


def register(app: typer.Typer) -> None:
    command(app, "serve", rich_help_panel="Running")(serve)


def serve(run: Run, queue: str | None, config: Path | None, **options: Any) -> None:
    """Serve a queue: a broker that others connect to. Ctrl-C lets requests end."""
    import asyncio
    import os

    from ..client.app.portal import loop_factory
    from .serve_logging import logging_to_stderr

    read = partial(read_settings, _options(run, queue, options), os.environ, config)
    settings = read()
    _refuse_no_store(settings)
    level = "debug" if run.debug else settings.log_level
    ports = listening(settings)
    with (
        logging_to_stderr(settings.log_format, level),
        asyncio.Runner(loop_factory=loop_factory()) as runner,
    ):
        runner.run(_serve(settings, ports, read, as_json=run.json))


# ---- options: one for each setting ----


def _signature() -> inspect.Signature:
    keyword = inspect.Parameter.KEYWORD_ONLY
    queue = Annotated[
        str | None,
        typer.Argument(metavar="URL", help="The queue's database; the same as --url.", show_default=False),
    ]
    file = Annotated[
        Path | None,
        typer.Option("--config", "-c", metavar="FILE", help="Settings in TOML. Default: POSTROOM_CONFIG."),
    ]
    found = [
        inspect.Parameter("run", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Run),
        inspect.Parameter("queue", keyword, annotation=queue, default=None),
        inspect.Parameter("config", keyword, annotation=file, default=None),
    ]
    for one in fields_of(ServeSettings):
        if one.name not in ("url", "shards"):  # every command has those
            found.append(inspect.Parameter(one.name, keyword, annotation=_option(one), default=None))
    return inspect.Signature(found)


def _option(one: Any) -> Any:
    kind, name = one.metadata["kind"], key_of(one.name).replace("_", "-")
    flag = f"--{name}/--no-{name}" if kind == "flag" else f"--{name}"
    takes = {"flag": bool, "port": int, "count": int}.get(kind, str)
    metavar = "|".join(one.metadata["choices"]) if kind == "choice" else None
    return Annotated[
        takes | None,
        typer.Option(flag, help=one.metadata["help"], metavar=metavar, show_default=False),
    ]


serve.__signature__ = _signature()  # type: ignore[attr-defined]


def _options(run: Run, queue: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """What was given on the command line, by field."""
    if queue and run.named and queue != run.url:
        raise UsageError("the queue was named twice: leave out --url")
    found = {name: value for name, value in options.items() if value is not None}
    if queue or run.named:
        found["url"] = queue or run.url
    if run.shards:
        found["shards"] = dict(run.shards)
    return found


def _refuse_no_store(settings: ServeSettings) -> None:
    from ..address import parse, parse_shards

    parse_shards(settings.shards)
    if parse(settings.url).kind not in _STORES:
        raise InvalidURL("a broker works on a database, not on another broker: name the database with --url")


# ---- life ----


async def _serve(
    settings: ServeSettings, listening: Listening, read: Callable[[], ServeSettings], *, as_json: bool
) -> None:
    import asyncio
    import gc
    import time

    from ..broker.gatekeeper import Gatekeeper
    from ..clock import SystemClock
    from ..wire.server import WireServer
    from .serve_limits import fit
    from .serve_logging import fields
    from .serve_shards import NewShards

    told = asyncio.Event()
    _on_signals(lambda: _tell(told))
    listening, connections = fit(settings, listening)
    broker = await _open(settings)
    try:
        gatekeeper = Gatekeeper(broker.store, broker.in_thread, SystemClock(), dev=settings.dev)
        server = WireServer(broker, listening, gatekeeper)
        app = make_http(server, gatekeeper, settings)  # before anybody can come: it takes half a second
        await server.start()
        http: HttpServer | None = None
        try:
            http = await start_http(app, server, settings, connections)
            await server.enter_again()
            _on_hangup(NewShards(broker, settings.shards, read))
            say_serving(settings, server.url, http)
            if not settings.dev:
                await show_first_token(broker, server.url, as_json=as_json)
            gc.freeze()  # what is here stays: looking through it again and again took 25 ms each time
            await _until_told(told, http)
            log.info(
                "stopping", extra=fields(grace_ms=settings.grace_ms, connections=len(server.connections))
            )
        finally:
            began = time.monotonic()
            stopping = [server.stop(settings.grace_ms)]
            if http is not None:
                stopping.append(http.stop(settings.grace_ms / 1000))
            await asyncio.gather(*stopping)
    finally:
        await broker.close()
    log.info("stopped", extra=fields(took_ms=round((time.monotonic() - began) * 1000)))


def make_http(server: WireServer, gatekeeper: Gatekeeper, settings: ServeSettings) -> FastAPI | None:
    """What is served over HTTP. None: it is switched off, or not installed."""
    if not settings.http_port:
        return None
    try:
        import postroom.http.server  # noqa: F401

        from ..http.app import make_app
    except UsageError as missing:
        log.info("no HTTP: %s; http_port = 0 says that this is meant", missing)
        return None
    return make_app(server.broker, gatekeeper, server=server)


async def start_http(
    app: FastAPI | None, server: WireServer, settings: ServeSettings, connections: int
) -> HttpServer | None:
    if app is None:
        return None
    from ..http.server import serve_http

    tls, handshakes = server.listening.tls, server.listening.handshakes
    return await serve_http(
        app, settings.http_host, settings.http_port, tls, most=connections, handshakes=handshakes
    )


def listening(settings: ServeSettings) -> Listening:
    from ..tls import server_context
    from ..wire.listening import Listening

    return Listening(
        host=settings.host,
        port=settings.port,
        zone=settings.zone,
        advertise=settings.advertise,
        tls=server_context(settings),
        max_connections=settings.max_connections,
        max_frame_bytes=settings.max_frame_bytes,
        unauthenticated_ms=settings.unauthenticated_ms,
        silent_ms=settings.idle_ms,
    )


async def _open(settings: ServeSettings) -> Broker:
    from ..address import parse, parse_shards
    from ..broker.embedded import open_endpoint
    from ..broker.measured import measured
    from ..config import DEFAULTS

    address = parse(settings.url)
    missing = address.path is not None and not address.path.exists()
    broker = await open_endpoint(
        address,
        limits=replace(DEFAULTS, reply_topics=settings.reply_topics),
        migrate=settings.migrate,
        shards=parse_shards(settings.shards),
        growing=True,
    )
    if missing:
        exits.say_note(f"created the queue {address.path}")
    return measured(broker) if settings.http_port else broker  # /metrics shows what it counts


def _on_signals(tell: Callable[[], None]) -> None:
    import asyncio
    import signal

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            loop.add_signal_handler(number, tell)
        except NotImplementedError:  # Windows
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(tell))


def _on_hangup(new_shards: NewShards) -> None:
    import asyncio
    import signal

    with suppress(AttributeError, NotImplementedError):  # Windows has no such signal
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, new_shards.look)


def _tell(told: asyncio.Event) -> None:
    if told.is_set():
        import os

        log.warning("told again: ending at once")
        sys.stderr.flush()
        os._exit(exits.INTERRUPTED)
    told.set()


async def _until_told(told: asyncio.Event, http: HttpServer | None) -> None:
    """HTTP that ends by itself is an error of this broker: it is not to live on without."""
    import asyncio

    waits: list[asyncio.Task[Any]] = [asyncio.create_task(told.wait())]
    if http is not None:
        waits.append(http.task)
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    if not waits[0].done():
        waits[0].cancel()
        if http is not None:
            http.task.result()


def say_serving(settings: ServeSettings, url: str, http: HttpServer | None) -> None:
    from ..address import parse
    from .serve_logging import fields

    address = parse(settings.url)
    log.info(
        "serving",
        extra=fields(
            url=url,
            http=_http_url(settings, http.port) if http is not None else "off",
            store=address.shown or settings.url,
            shards=len(settings.shards) + 1,
            tls=settings.tls,
            dev=settings.dev,
            zone=settings.zone,
        ),
    )
    if settings.exposed:
        log.warning(
            "tokens and messages cross the network for everybody to read: set tls_cert and tls_key, or "
            "listen on 127.0.0.1 only",
            extra=fields(host=settings.host),
        )
    if settings.dev:
        log.warning("dev: whoever is on this machine may do everything, without a token")


def _http_url(settings: ServeSettings, port: int) -> str:
    host = f"[{settings.http_host}]" if ":" in settings.http_host else settings.http_host
    return f"{'https' if settings.tls else 'http'}://{host}:{port}"


# ---- the first token ----


async def show_first_token(broker: Broker, url: str, *, as_json: bool) -> None:
    """The very first start makes a principal for whoever started it, and shows its token once."""
    from ..broker.gatekeeper import new_token
    from ..model.access import ALL, Principal, hash_of

    access = broker.store.access
    if await broker.in_thread(access.principals):
        return
    token = new_token()
    with suppress(PrincipalExists):  # another broker was started in the same moment, and shows its own
        await broker.in_thread(access.add, Principal("admin", ALL), hash_of(token))
        try:
            _show_token(url, token, as_json=as_json)
        except OSError:  # nobody reads our stdout
            exits.leave_closed_pipe()
            log.error("the first token could not be shown: `postroom access rotate admin` makes another")


def _show_token(url: str, token: str, *, as_json: bool) -> None:
    if as_json:
        show.json_line({"principal": "admin", "token": token, "url": url})
    else:
        typer.echo(
            "The first start of this queue made the principal admin, who may do everything.\n"
            "Its token is shown this once (`postroom access rotate admin` makes another):\n\n"
            f"    POSTROOM_URL={url}\n"
            f"    POSTROOM_TOKEN={token}\n"
        )
    sys.stdout.flush()
