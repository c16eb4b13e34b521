"""What an address may look like, and what somebody who mistyped one probably meant.

Decides which store an address names. Must never open anything, never guess, and never show a password:
whatever is not exactly one of

    sqlite:///orders.db               a file, relative to the working directory
    sqlite:////var/orders.db          a file, absolute (four slashes)
    memory://                         a private queue in this process
    memory://name                     the same, shared within this process by its name
    postgresql://user:pw@host/db      a database on PostgreSQL
    mysql://user:pw@host/db           a database on MySQL or MariaDB
    postroom://a:7070,b:7070          brokers that are served, one of them at least

(and the usual spellings: postgres://, mariadb://, postgresql+psycopg://, mysql+pymysql://) is refused, with
the spelling that was probably meant.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from .errors import InvalidSetting, InvalidURL

__all__ = ["FIRST_SHARD", "Address", "named_urls", "parse", "parse_shards", "shards_named"]

FIRST_SHARD = "first"
"""How people call the shard that the address itself names."""

_POSTGRES = ("postgresql", "postgres", "postgresql+psycopg")
_MYSQL = ("mysql", "mariadb", "mysql+pymysql", "mariadb+pymysql")
_SCHEMES = ("sqlite", "memory", "postroom", *_POSTGRES, *_MYSQL)
_BROKER = re.compile(r"(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:(?P<port>[0-9]{1,5}))?")
_SHARD_NAME = re.compile(r"[A-Za-z0-9-]{1,60}")
_MEMORY_NAME = re.compile(r"[A-Za-z0-9._-]{0,120}")
_EXAMPLES = (
    "sqlite:///orders.db (a file), memory:// (this process only), postgresql://user:password@host/database, "
    "mysql://user:password@host/database or postroom://host:7070 (a broker)"
)
_MYSQL_OPTIONS = ("unix_socket", "ssl_ca", "ssl_cert", "ssl_key", "ssl_verify_cert", "ssl_verify_identity")
_BAD_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclass(frozen=True, slots=True)
class Address:
    kind: str = "memory"  # "sqlite", "memory", "postgresql", "mysql" or "postroom"
    path: Path | None = None  # sqlite
    name: str = ""  # memory; "": private
    dsn: str = field(default="", repr=False)  # postgresql: for the driver, with the password
    server: tuple[tuple[str, object], ...] = field(default=(), repr=False)  # mysql: for the driver
    shown: str = ""  # a database server without its password, for people
    pgbouncer: bool = False
    brokers: tuple[str, ...] = ()  # postroom: host:port of each


def parse(url: str) -> Address:
    if not isinstance(url, str):
        raise InvalidURL(f"an address is text, such as sqlite:///orders.db; not {url!r}{_path_hint(url)}")
    scheme, colon, rest = url.partition(":")
    if not colon or (len(scheme) == 1 and scheme.isalpha()):  # no scheme, or a Windows drive
        if "@" in url:  # there may be a password before it
            raise InvalidURL(f"the address '…@{url.rpartition('@')[2]}' has no scheme: use {_EXAMPLES}")
        raise InvalidURL(f"{url!r} has no scheme: use {_no_scheme_hint(url)}")
    if scheme == "memory":
        return _memory(url, rest)
    if scheme == "sqlite":
        return _sqlite(url, rest)
    if scheme in _POSTGRES:
        return _postgres(url)
    if scheme in _MYSQL:
        return _mysql(url)
    if scheme == "postroom":
        return _brokers(url, rest)
    raise InvalidURL(_unknown_scheme(url, scheme, rest))


def parse_shards(shards: Mapping[str, str] | None) -> dict[str, Address]:
    """The addresses of further shards, by name."""
    if shards is None:
        return {}
    if not isinstance(shards, Mapping):
        raise InvalidSetting(
            "shards= takes addresses by name, such as shards={'b': 'mysql://user:password@host/database'}"
        )
    found: dict[str, Address] = {}
    for name, url in shards.items():
        if not isinstance(name, str) or not _SHARD_NAME.fullmatch(name):
            raise InvalidSetting(
                f"shards={{{name!r}: …}}: the name of a shard has letters, digits and '-', 60 at most"
            )
        if name == FIRST_SHARD:
            raise InvalidSetting(
                f"shards={{{name!r}: …}}: that is the database you connect to; choose another name"
            )
        found[name] = parse(url)
        if found[name].kind == "postroom":
            raise InvalidSetting(f"shards={{{name!r}: …}}: a shard is a database, and not a broker")
    return found


_IN_ENVIRONMENT = (
    "write b=URL,c=URL; a comma inside a URL is not allowed there: write %2C for it, or use --shard"
)


def shards_named(environment: str, where: str) -> dict[str, str]:
    """Return the shards that a variable of the environment lists: `b=URL,c=URL`."""
    parts = [part.strip() for part in environment.split(",") if part.strip()]
    return named_urls(parts, where, _IN_ENVIRONMENT)


def named_urls(parts: list[str], where: str, spelling: str) -> dict[str, str]:
    """Return URLs by name. An error never shows what was written: there may be a password in it."""
    found: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        name, equals, url = part.partition("=")
        if not (equals and name and "://" in url) or "://" in name:
            raise InvalidSetting(f"{where}, number {number}, is not a shard: {spelling}")
        if name in found:
            raise InvalidSetting(f"{where} names shard {name!r} twice: give each name one database")
        found[name] = url
    return found


def _memory(url: str, rest: str) -> Address:
    name = rest.removeprefix("//")
    if not rest.startswith("//") or name.startswith("/"):
        raise InvalidURL(f"{url!r} is no address: did you mean memory://{rest.strip('/')}?")
    if not _MEMORY_NAME.fullmatch(name):
        raise InvalidURL(f"{url!r}: the name after memory:// has letters, digits, '.', '_' and '-' only")
    return Address(name=name)


def _sqlite(url: str, rest: str) -> Address:
    path = rest.removeprefix("///")
    if path in ("", "//", "/", ":memory:") or rest.strip("/") in ("", ":memory:"):
        raise InvalidURL(f"{url!r} names no file: use {_EXAMPLES}")
    if not rest.startswith("///"):
        absolute = rest.startswith("/") and not rest.startswith("//")
        meant = f"sqlite:////{rest.strip('/')}" if absolute else f"sqlite:///{rest.lstrip('/')}"
        raise InvalidURL(f"{url!r} has too few slashes: did you mean {meant}?")
    if "?" in path:
        raise InvalidURL(f"{url!r}: an address has no options after '?'; give them to connect()")
    if path.endswith("/"):
        raise InvalidURL(f"{url!r} names a directory: add a file name, such as {url}orders.db")
    return Address("sqlite", path=Path(path).expanduser())


def _postgres(url: str) -> Address:
    shown, options = _checked(url)
    bouncer = _flag(shown, "pgbouncer", options.pop("pgbouncer", "0"))
    head, _, query = ("postgresql:" + url.partition(":")[2]).partition("?")
    kept = "&".join(part for part in query.split("&") if part and not part.startswith("pgbouncer="))
    return Address("postgresql", dsn=f"{head}?{kept}" if kept else head, shown=shown, pgbouncer=bouncer)


def _mysql(url: str) -> Address:
    shown, options = _checked(url)
    unknown = set(options) - set(_MYSQL_OPTIONS)
    if unknown:
        raise InvalidURL(f"{shown}: unknown option {min(unknown)!r}; there are {', '.join(_MYSQL_OPTIONS)}")
    parts = urlsplit(url)
    server: dict[str, object] = {
        "host": parts.hostname or "localhost",
        "port": parts.port or 3306,
        "user": unquote(parts.username or ""),
        "password": unquote(parts.password or ""),
        "database": unquote(parts.path.lstrip("/")),
    }
    for name, value in options.items():
        server[name] = _flag(shown, name, value) if name.startswith("ssl_verify") else value
    return Address("mysql", server=tuple(server.items()), shown=shown)


def _brokers(url: str, rest: str) -> Address:
    listed = rest.removeprefix("//").rstrip("/")
    if "@" in listed:  # a secret in an address ends up in logs
        raise InvalidURL(
            f"postroom://…@{listed.rpartition('@')[2]}: a token is not a part of the address; give it to "
            "connect(token=…), or set POSTROOM_TOKEN"
        )
    found = []
    for one in listed.split(","):
        match = _BROKER.fullmatch(one.strip())
        if not rest.startswith("//") or match is None or not 0 < int(match["port"] or 7070) < 65536:
            raise InvalidURL(
                f"{url!r} is no address of brokers: use postroom://host:7070, or postroom://a:7070,b:7070"
            )
        found.append(f"{match['host']}:{match['port'] or 7070}")
    return Address("postroom", brokers=tuple(dict.fromkeys(found)), shown=f"postroom://{','.join(found)}")


def _checked(url: str) -> tuple[str, dict[str, str]]:
    """The address without its password, and its options; refuses what no server could have."""
    try:
        parts = urlsplit(url)
        port = parts.port
        if _BAD_PERCENT.search(url) or "@" in parts.path:
            raise ValueError
    except ValueError:  # what is wrong may be a part of the password: it is not shown
        raise InvalidURL(
            f"the address {url.partition(':')[0]}://…@{url.rpartition('@')[2]} cannot be read: the port is a "
            "number, and a special character in user or password is written as %xx (@ is %40, % is %25)"
        ) from None
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname or ""
    who = f"{parts.username}@" if parts.username else ""
    shown = f"{parts.scheme}://{who}{host}{f':{port}' if port else ''}{parts.path}"
    if not parts.netloc and not parts.query:
        raise InvalidURL(f"{shown} names no server: use {parts.scheme}://user:password@host/database")
    if parts.fragment:
        raise InvalidURL(f"{shown}: '#' in an address is written as %23")
    if len(parts.path) < 2 or "/" in parts.path[1:]:
        raise InvalidURL(
            f"{shown} names no database: add it, such as {parts.scheme}://{who}{host or 'host'}/orders"
        )
    return shown, dict(parse_qsl(parts.query, keep_blank_values=True))


def _flag(shown: str, name: str, value: str) -> bool:
    if value.lower() not in _TRUE + _FALSE:
        raise InvalidURL(f"{shown}: {name}={value} is neither 1 nor 0")
    return value.lower() in _TRUE


def _unknown_scheme(url: str, scheme: str, rest: str) -> str:
    shown = url if "@" not in url else f"{scheme}://…@{url.rpartition('@')[2]}"
    close = get_close_matches(scheme.lower(), _SCHEMES, n=1, cutoff=0.6)
    if close:
        meant = f"{close[0]}:{rest}" if "@" not in url else f"{close[0]}://"
        return f"{shown!r}: there is no scheme {scheme!r}; did you mean {meant}?"
    return f"{shown!r}: there is no scheme {scheme!r}: use {_EXAMPLES}"


def _no_scheme_hint(url: str) -> str:
    close = get_close_matches(url.lower(), _SCHEMES[:2], n=1, cutoff=0.7)
    if close:
        return _EXAMPLES
    return f"sqlite:///{url}" if url else _EXAMPLES


def _path_hint(url: object) -> str:
    return f"; did you mean 'sqlite:///{url}'?" if isinstance(url, Path) else ""
