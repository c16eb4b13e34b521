"""Every setting of a served broker, with its default, and where settings are read from.

Defaults < a TOML file < the environment < options of the command line. A setting has one name everywhere:
`http_port` in the file, `POSTROOM_SERVE_HTTP_PORT`, `--http-port`. Durations and sizes are written with units
("10s", "64 MB") and lose theirs in the name: `grace_ms` is written `grace`. The two that every command has
are POSTROOM_URL and POSTROOM_SHARDS in the environment; the latter is read by the command line.

Must never ignore what it does not understand, and never show an address: there may be a password in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from .config import DEFAULTS
from .errors import InvalidSetting
from .units import duration_ms, size_bytes

__all__ = ["ServeSettings", "is_loopback", "key_of", "read_settings"]

_ENVIRONMENT = "POSTROOM_SERVE_"
_FRAME_ROOM = 1 << 20  # what comes with a batch in a frame
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def _setting(default: Any, kind: str, help: str, **more: Any) -> Any:
    facts = {"kind": kind.removeprefix("secret "), "help": help, **more}
    shown = not kind.startswith("secret ")
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), repr=shown, metadata=facts)
    return field(default=default, repr=shown, metadata=facts)


@dataclass(frozen=True, slots=True)
class ServeSettings:
    # the store
    url: str = _setting("sqlite:///postroom.db", "secret text", "The queue's database.")
    shards: Mapping[str, str] = _setting({}, "secret table", "Further databases of the queue, by name.")
    migrate: bool = _setting(False, "flag", "Make or change the tables of a database server at the start.")

    # where it listens
    host: str = _setting("127.0.0.1", "text", "Where to listen; 0.0.0.0 is every address of this machine.")
    port: int = _setting(7070, "port", "For clients; 0 is any that is free.")
    http_host: str = _setting("127.0.0.1", "text", "Where to listen for HTTP.")
    http_port: int = _setting(7071, "port", "For HTTP, if the extra server is installed; 0 is none.")
    kafka: int = _setting(0, "port", "For Kafka clients, if the extra kafka is installed; 0 is none.")
    kafka_advertised: str = _setting(
        "", "text", "HOST:PORT that Kafka clients are told; else host and kafka."
    )
    kafka_create_topics: bool = _setting(
        False, "flag", "Make a topic, with 4 partitions, when a Kafka client asks for one that is not there."
    )
    advertise: str = _setting("", "text", "HOST:PORT that clients are told, if it is not host and port.")
    zone: str = _setting("", "text", "Where it is; clients prefer brokers of their own zone.")
    dev: bool = _setting(False, "flag", "Nobody on this machine needs a token; other hosts are refused.")

    # TLS: paths of PEM files; "": none
    tls_cert: str = _setting("", "text", "The broker's certificate, a PEM file: speak TLS.")
    tls_key: str = _setting("", "text", "The certificate's key, a PEM file without a password.")
    tls_client_ca: str = _setting(
        "", "text", "Authorities (PEM) whose certificates clients may show instead of a token."
    )

    # limits
    max_connections: int = _setting(10_000, "count", "Connections at once.")
    reply_topics: int = _setting(
        DEFAULTS.reply_topics, "count", "Of one principal at once; it makes twice as many a minute."
    )
    max_frame_bytes: int = _setting(16 << 20, "size", "The longest request.")
    max_answer_bytes: int = _setting(
        16 << 20, "size", "The longest answer with messages; one batch always fits."
    )
    answers_bytes: int = _setting(
        256 << 20, "size", "Answers that are not read yet, of all clients; half of it of one principal."
    )
    slow_reader_ms: int = _setting(
        10_000, "duration", "Who leaves answers unread for so long is cut off if others need the room."
    )
    unauthenticated_ms: int = _setting(10_000, "duration", "A connection says within this who it is.")
    idle_ms: int = _setting(
        60_000, "duration", "A connection that is silent for so long is closed; clients are for 10s at most."
    )
    grace_ms: int = _setting(10_000, "duration", "At a stop, requests under way may take so long to end.")

    # logs, on stderr
    log_format: str = _setting("text", "choice", "Of the lines on stderr.", choices=("text", "json"))
    log_level: str = _setting(
        "info", "choice", "What is logged.", choices=("debug", "info", "warning", "error")
    )

    def __post_init__(self) -> None:
        for keys, sentence in _contradictions(self):
            raise InvalidSetting(sentence, keys=keys)

    @property
    def tls(self) -> bool:
        return bool(self.tls_cert)

    @property
    def exposed(self) -> bool:
        """Whether other machines reach it, with nothing that hides their tokens on the way."""
        open_http = self.http_port != 0 and not is_loopback(self.http_host)
        return not self.tls and (open_http or not is_loopback(self.host))


def is_loopback(host: str) -> bool:
    """Whether this is an address, or the name, of the machine itself."""
    import ipaddress

    if host == "localhost":
        return True
    try:
        found = ipaddress.ip_address(host.partition("%")[0].strip("[]"))
    except ValueError:
        return False
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback


def _contradictions(s: ServeSettings) -> list[tuple[tuple[str, ...], str]]:
    """What does not go together: which keys, and what to do."""
    found: list[tuple[tuple[str, ...], str]] = []
    for key, host in (("host", s.host), ("http_host", s.http_host)):
        if s.dev and not is_loopback(host):
            sentence = (
                f"dev lets everybody in without a token, so it is for this machine only: leave out dev, or "
                f"set {key} to 127.0.0.1 instead of {host!r}"
            )
            found.append((("dev", key), sentence))
    if bool(s.tls_cert) != bool(s.tls_key):
        have, lack = ("tls_cert", "tls_key") if s.tls_cert else ("tls_key", "tls_cert")
        found.append(((have,), f"{have} is nothing without {lack}: name both files, or none for no TLS"))
    if s.tls_client_ca and not s.tls_cert:
        sentence = (
            "tls_client_ca asks clients for certificates, which takes TLS: set tls_cert and tls_key too"
        )
        found.append((("tls_client_ca",), sentence))
    if s.port and s.port == s.http_port and s.host == s.http_host:
        sentence = f"port and http_port are both {s.port}: choose another http_port, or 0 for no HTTP"
        found.append((("port", "http_port"), sentence))
    for key, address in (("advertise", s.advertise), ("kafka_advertised", s.kafka_advertised)):
        if address and not _is_address(address):
            sentence = f"{key} is {address!r}: write host:port as clients reach it, such as mq-1.local:7070"
            found.append(((key,), sentence))
    found += _about_kafka(s)
    if s.max_frame_bytes < DEFAULTS.max_batch_bytes + _FRAME_ROOM:
        sentence = "max_frame is smaller than a batch may be: make it 9 MB at least"
        found.append((("max_frame_bytes",), sentence))
    if s.answers_bytes < 4 * s.max_answer_bytes:
        sentence = "answers has no room for four answers: make it four times max_answer at least"
        found.append((("answers_bytes", "max_answer_bytes"), sentence))
    if len(s.zone) > 60 or not s.zone.isprintable():
        found.append((("zone",), "zone is a name of 60 printable characters at most, such as eu-1"))
    return found


def _about_kafka(s: ServeSettings) -> list[tuple[tuple[str, ...], str]]:
    """What does not go together with Kafka clients."""
    found: list[tuple[tuple[str, ...], str]] = []
    taken = {s.port: "port"} | ({s.http_port: "http_port"} if s.host == s.http_host else {})
    if s.kafka and s.kafka in taken:
        other = taken[s.kafka]
        found.append(
            (("kafka", other), f"kafka and {other} are both {s.kafka}: choose another, such as 9092")
        )
    for key in ("kafka_advertised", "kafka_create_topics"):
        if getattr(s, key) and not s.kafka:
            found.append(((key,), f"{key} is nothing without kafka: name the port, such as 9092"))
    return found


def _is_address(text: str) -> bool:
    host, colon, port = text.rpartition(":")
    return bool(host and colon) and port.isdecimal() and 0 < int(port) < 65536 and "/" not in text


# ---- reading ----


def key_of(name: str) -> str:
    """How a field is written: `grace_ms` takes "10s" and is written `grace`."""
    return name.removesuffix("_ms").removesuffix("_bytes")


_FIELDS: dict[str, Field[Any]] = {key_of(one.name): one for one in fields(ServeSettings)}


def read_settings(
    options: Mapping[str, Any], environment: Mapping[str, str], config: str | Path | None = None
) -> ServeSettings:
    """`options` by field name, as they were written; `config` is the file, else POSTROOM_CONFIG names it."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name, value, origin in (
        *_from_file(config or environment.get("POSTROOM_CONFIG")),
        *_from_environment(environment),
        *_from_options(options),
    ):
        before = values.get(name)
        values[name] = {**before, **value} if isinstance(before, dict) else value
        origins[name] = origin
    try:
        return ServeSettings(**values)
    except InvalidSetting as error:
        keys = error.details.get("keys", ())
        named = dict.fromkeys(origins[key] for key in keys if key in origins)
        raise InvalidSetting(f"{' and '.join(named) or 'settings'}: {error}", **error.details) from None


def _from_file(path: str | Path | None) -> list[tuple[str, Any, str]]:
    import tomllib

    if not path:
        return []
    try:
        found = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        why = error.strerror or error
        raise InvalidSetting(f"{path} cannot be read ({why}): correct --config or POSTROOM_CONFIG") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidSetting(f"{path} is not TOML: {error}") from None
    return [
        (one.name, _CONVERT[one.metadata["kind"]](value, f"{path}: {key}", one), str(path))
        for key, value in found.items()
        for one in [_field(key, list(_FIELDS), f"{path}: {key!r}", lambda known: known)]
    ]


def _from_environment(environment: Mapping[str, str]) -> list[tuple[str, Any, str]]:
    found: list[tuple[str, Any, str]] = []
    if environment.get("POSTROOM_URL"):
        found.append(("url", environment["POSTROOM_URL"], "POSTROOM_URL"))
    keys = [key for key in _FIELDS if key not in ("url", "shards")]
    for variable, text in environment.items():
        if not variable.startswith(_ENVIRONMENT):
            continue
        key = variable.removeprefix(_ENVIRONMENT).lower()
        one = _field(key, keys, variable, lambda known: f"{_ENVIRONMENT}{known.upper()}")
        value = _CONVERT[one.metadata["kind"]](_untyped(text, one, variable), variable, one)
        found.append((one.name, value, variable))
    return found


def _from_options(options: Mapping[str, Any]) -> list[tuple[str, Any, str]]:
    found = []
    for name, value in options.items():
        one, option = _FIELDS[key_of(name)], f"--{key_of(name).replace('_', '-')}"
        found.append((name, _CONVERT[one.metadata["kind"]](value, option, one), option))
    return found


def _field(key: str, known: list[str], where: str, written: Callable[[str], str]) -> Field[Any]:
    if key in known:
        return _FIELDS[key]
    close = get_close_matches(key, known, n=1, cutoff=0.6)
    names = ", ".join(map(written, known))
    hint = f"did you mean {written(close[0])}?" if close else f"there are {names}"
    raise InvalidSetting(f"{where} is no setting: {hint}")


def _untyped(text: str, one: Field[Any], variable: str) -> Any:
    """Text of the environment as TOML would have it."""
    kind = one.metadata["kind"]
    if kind == "flag":
        if text.lower() not in _TRUE + _FALSE:
            raise InvalidSetting(f"{variable}={text!r} is neither 1 nor 0")
        return text.lower() in _TRUE
    return int(text) if kind in ("port", "count") and text.strip().isdecimal() else text


def _text(value: Any, where: str, one: Field[Any]) -> str:
    if isinstance(value, str):
        return value
    raise InvalidSetting(f'{where} takes text in quotes, such as "{one.default or "…"}"')


def _table(value: Any, where: str, one: Field[Any]) -> dict[str, str]:
    if isinstance(value, dict) and all(isinstance(url, str) for url in value.values()):
        return value
    raise InvalidSetting(f'{where} takes addresses by name: [shards], and below it b = "mysql://host/queue"')


def _flag(value: Any, where: str, one: Field[Any]) -> bool:
    if isinstance(value, bool):
        return value
    raise InvalidSetting(f"{where} takes true or false, without quotes; not {value!r}")


def _port(value: Any, where: str, one: Field[Any]) -> int:
    if type(value) is int and 0 <= value <= 65535:
        return value
    raise InvalidSetting(f"{where} takes a port from 0 to 65535, such as {one.default}; not {value!r}")


def _count(value: Any, where: str, one: Field[Any]) -> int:
    if type(value) is int and value > 0:
        return value
    raise InvalidSetting(f"{where} takes a whole number of 1 or more, such as {one.default}; not {value!r}")


def _choice(value: Any, where: str, one: Field[Any]) -> str:
    choices = one.metadata["choices"]
    if value in choices:
        return str(value)
    raise InvalidSetting(f"{where} takes one of {', '.join(choices)}; not {value!r}")


_CONVERT: dict[str, Callable[[Any, str, Field[Any]], Any]] = {
    "text": _text,
    "table": _table,
    "flag": _flag,
    "port": _port,
    "count": _count,
    "choice": _choice,
    "duration": lambda value, where, one: duration_ms(value, name=where),
    "size": lambda value, where, one: size_bytes(value, name=where),
}
