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
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields as fields_of
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from ...address import parse_shards
from ...errors import InvalidURL, PostroomError, PrincipalExists, UsageError
from ...serve_settings import ServeSettings, key_of, read_settings
from ..framework import exits, show
from ..framework.command import Run
from ..framework.log_lines import fields, logging_to_stderr

if TYPE_CHECKING:
    import asyncio

    from fastapi import FastAPI

    from ...broker.access import Gatekeeper
    from ...broker.served import Servable
    from ...http.server import HttpServer
    from ...kafka.server import KafkaServer
    from ...wire.server.listening import Listening
    from ...wire.server.server import WireServer

__all__ = [
    "Fitted",
    "NewShards",
    "fit",
    "fitted",
    "listening",
    "make_http",
    "make_kafka",
    "on_signals",
    "raise_limit",
    "say_serving",
    "serve",
    "show_first_token",
    "start_http",
]


log = logging.getLogger("postroom.serve")

_STORES = ("sqlite", "memory", "postgresql", "mysql")


# ---- the files that the process may open, and so the connections that it may have ----
# The soft limit is raised to the hard one, which every process may do. Where that is not enough, fewer
# connections are allowed than the settings say, and the log says so: a client that is told to ask another
# broker knows more than one whose connection is reset.

_OWN = 100  # files of the process itself: the store's, the log, what Python has open
_HTTP = 1000
_LEAST = 8


class Fitted(NamedTuple):
    """A broker may have so many connections."""

    wire: int
    http: int
    handshakes: int  # on each port


def fit(settings: ServeSettings, listening: Listening) -> tuple[Listening, int]:
    """Return what to listen with, and the connections of HTTP; less than was asked for is logged."""
    files = raise_limit()
    found = fitted(files, settings)
    if found.wire < settings.max_connections:
        log.warning(
            "this process may open %d files, which is too few for max_connections = %d: it takes %d, and "
            "%d of HTTP; raise the limit of open files (ulimit -n, LimitNOFILE), or lower max_connections",
            files, settings.max_connections, found.wire, found.http,
        )  # fmt: skip
    return replace(listening, max_connections=found.wire, handshakes=found.handshakes), found.http


def fitted(files: int | None, settings: ServeSettings) -> Fitted:
    """Return the connections that so many files allow; None is any number of files.

    >>> fitted(256, ServeSettings())
    Fitted(wire=117, http=39, handshakes=256)
    """
    from ...wire.server.listening import HANDSHAKES as handshakes

    http = _HTTP if settings.http_port else 0
    if files is None:
        return Fitted(settings.max_connections, http, handshakes)
    doors = 2 if settings.kafka else 1  # with as many connections each
    room, ports = max(files - _OWN, 4 * _LEAST), doors + (1 if settings.http_port else 0)
    if settings.tls:
        handshakes = max(_LEAST, min(handshakes, room // 8))
        room -= ports * handshakes
    if doors * settings.max_connections + http > room:
        http = min(http, max(_LEAST, room // 4)) if http else 0
    return Fitted(max(_LEAST, min(settings.max_connections, (room - http) // doors)), http, handshakes)


def raise_limit() -> int | None:
    """Raise the limit of open files as far as it may be, and return it; None is any number."""
    try:
        import resource
    except ImportError:  # pragma: no cover - Windows
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (OSError, ValueError):  # such as macOS, where the hard limit is not what is allowed
            pass
    return None if soft == resource.RLIM_INFINITY else soft


class NewShards:
    """Shards that a broker is given while it runs: its settings are read again at SIGHUP (R6).

    What is new is added. An address that is another one now, or gone, needs a restart: partitions may be in
    use there, and the log says so. A mistake in the settings changes nothing. An address is never logged:
    there may be a password in it.
    """

    def __init__(self, broker: Servable, known: Mapping[str, str], read: Callable[[], ServeSettings]) -> None:
        self._broker, self._read = broker, read
        self._known = dict(known)
        self._reading: asyncio.Task[None] | None = None

    def look(self) -> None:
        """Read the settings again, in the event loop; a signal that comes meanwhile does nothing more."""
        import asyncio

        if self._reading is None or self._reading.done():
            self._reading = asyncio.get_running_loop().create_task(self.run_once())

    async def run_once(self) -> None:
        try:
            found = self._read().shards
            parse_shards(found)
        except PostroomError as error:
            log.error("the settings were read again, and nothing is changed: %s", error)
            return
        other = sorted(name for name, url in self._known.items() if found.get(name) != url)
        if other:
            log.warning("shards that were changed or left out need a restart", extra=fields(shards=other))
        new = {name: url for name, url in found.items() if name not in self._known}
        for name, url in new.items():
            await self._add(name, url)
        if not new:
            log.info("the settings were read again: no new shard", extra=fields(shards=len(self._known) + 1))

    async def _add(self, name: str, url: str) -> None:
        try:
            await self._broker.add_shards(parse_shards({name: url}))
        except PostroomError as error:
            log.error("shard %r is not added: %s", name, error)
        else:
            self._known[name] = url
            log.info("shard added", extra=fields(shard=name, shards=len(self._known) + 1))


# ---- the command, with an option for each setting ----


def serve(run: Run, queue: str | None, config: Path | None, **options: Any) -> None:
    """Serve a queue: a broker that others connect to. Ctrl-C lets requests end."""
    import asyncio
    import os

    from ...sync.portal import loop_factory

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
    """Return what was given on the command line, by field."""
    if queue and run.named and queue != run.url:
        raise UsageError("the queue was named twice: leave out --url")
    found = {name: value for name, value in options.items() if value is not None}
    if queue or run.named:
        found["url"] = queue or run.url
    if run.shards:
        found["shards"] = dict(run.shards)
    return found


def _refuse_no_store(settings: ServeSettings) -> None:
    from ...address import parse, parse_shards

    parse_shards(settings.shards)
    if parse(settings.url).kind not in _STORES:
        raise InvalidURL("a broker works on a database, not on another broker: name the database with --url")


# ---- the broker's life ----


async def _serve(
    settings: ServeSettings, listening: Listening, read: Callable[[], ServeSettings], *, as_json: bool
) -> None:
    import asyncio
    import gc
    import time

    from ...broker.access import Gatekeeper
    from ...clock import SystemClock
    from ...wire.server.server import WireServer

    told = asyncio.Event()
    on_signals(lambda: _tell(told))
    listening, connections = fit(settings, listening)
    broker = await _open(settings)
    try:
        gatekeeper = Gatekeeper(broker.store, broker.in_thread, SystemClock(), dev=settings.dev)
        server = WireServer(broker, listening, gatekeeper)
        app = make_http(server, gatekeeper, settings)  # before anybody can come: it takes half a second
        kafka = make_kafka(server, gatekeeper, settings)
        await server.start()
        http: HttpServer | None = None
        try:
            if kafka is not None:
                await kafka.start()
            http = await start_http(app, server, settings, connections)
            await server.enter_again()
            _on_hangup(NewShards(broker, settings.shards, read))
            say_serving(settings, server.url, http, kafka)
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
            if kafka is not None:
                stopping.append(kafka.stop(settings.grace_ms))
            await asyncio.gather(*stopping)
    finally:
        await broker.close()
    log.info("stopped", extra=fields(took_ms=round((time.monotonic() - began) * 1000)))


def make_kafka(server: WireServer, gatekeeper: Gatekeeper, settings: ServeSettings) -> KafkaServer | None:
    """Make what Kafka clients talk to; None if it is switched off. UsageError if it is not installed."""
    if not settings.kafka:
        return None
    from ...kafka.server import KafkaServer

    ports = replace(server.listening, port=settings.kafka, advertise=settings.kafka_advertised)
    creates = settings.kafka_create_topics
    return KafkaServer(server.broker, ports, gatekeeper, server.answers, creates_topics=creates)


def make_http(server: WireServer, gatekeeper: Gatekeeper, settings: ServeSettings) -> FastAPI | None:
    """Make what is served over HTTP; None if it is switched off, or not installed."""
    if not settings.http_port:
        return None
    try:
        import postroom.http.server  # noqa: F401

        from ...console.pages import add_console
        from ...http.app import make_app
    except UsageError as missing:
        log.info("no HTTP: %s; http_port = 0 says that this is meant", missing)
        return None
    app = make_app(server.broker, gatekeeper, server=server)
    add_console(app)
    return app


async def start_http(
    app: FastAPI | None, server: WireServer, settings: ServeSettings, connections: int
) -> HttpServer | None:
    if app is None:
        return None
    from ...http.server import serve_http

    tls, handshakes = server.listening.tls, server.listening.handshakes
    return await serve_http(
        app, settings.http_host, settings.http_port, tls, most=connections, handshakes=handshakes
    )


def listening(settings: ServeSettings) -> Listening:
    from ...tls import server_context
    from ...wire.server.listening import Listening

    return Listening(
        host=settings.host,
        port=settings.port,
        zone=settings.zone,
        advertise=settings.advertise,
        tls=server_context(settings),
        max_connections=settings.max_connections,
        max_frame_bytes=settings.max_frame_bytes,
        one_answer_bytes=settings.max_answer_bytes,
        answer_bytes=settings.answers_bytes // 4,
        all_answer_bytes=settings.answers_bytes,
        slow_reader_ms=settings.slow_reader_ms,
        unauthenticated_ms=settings.unauthenticated_ms,
        silent_ms=settings.idle_ms,
    )


async def _open(settings: ServeSettings) -> Servable:
    from ...address import parse, parse_shards
    from ...broker.broker import open_endpoint
    from ...broker.served import measured
    from ...config import DEFAULTS

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


def on_signals(tell: Callable[[], None]) -> None:
    """Call this at each signal that asks the process to end."""
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

        log.warning("second signal: ending at once")
        sys.stderr.flush()
        os._exit(exits.INTERRUPTED)
    told.set()


async def _until_told(told: asyncio.Event, http: HttpServer | None) -> None:
    """Wait for the end. HTTP that ends by itself is an error of this broker: it is not to live on without."""
    import asyncio

    waits: list[asyncio.Task[Any]] = [asyncio.create_task(told.wait())]
    if http is not None:
        waits.append(http.task)
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    if not waits[0].done():
        waits[0].cancel()
        if http is not None:
            http.task.result()


def say_serving(
    settings: ServeSettings, url: str, http: HttpServer | None, kafka: KafkaServer | None = None
) -> None:
    from ...address import parse

    address = parse(settings.url)
    log.info(
        "serving",
        extra=fields(
            url=url,
            http=_http_url(settings, http.port) if http is not None else "off",
            **({} if kafka is None else {"kafka": kafka.address}),
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
        log.warning("dev mode: anyone on this machine has full access without a token")


def _http_url(settings: ServeSettings, port: int) -> str:
    host = f"[{settings.http_host}]" if ":" in settings.http_host else settings.http_host
    return f"{'https' if settings.tls else 'http'}://{host}:{port}"


# ---- the first token ----


async def show_first_token(broker: Servable, url: str, *, as_json: bool) -> None:
    """The very first start makes a principal for whoever started it, and shows its token once."""
    from ...broker.access import new_token
    from ...endpoint.asker import asker
    from ...model.access import ALL, Principal, hash_of

    access = broker.store.access
    if await broker.in_thread(access.principals):
        return
    token = new_token()
    with suppress(PrincipalExists):  # another broker was started in the same moment, and shows its own
        add = partial(access.add, by=asker())
        await broker.in_thread(add, Principal("admin", ALL), hash_of(token))
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
