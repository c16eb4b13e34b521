"""What an address may look like, and what somebody who mistyped one probably meant.

Decides which store an address names. Must never open anything and never guess: whatever is not exactly one of

    sqlite:///orders.db      a file, relative to the working directory
    sqlite:////var/orders.db a file, absolute (four slashes)
    memory://                a private queue in this process
    memory://name            the same, shared within this process by its name

is refused, with the spelling that was probably meant.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from ..errors import InvalidURL

__all__ = ["Address", "parse"]

_LATER = ("postgresql", "postgres", "mysql", "mariadb", "penstock")
_SCHEMES = ("sqlite", "memory", *_LATER)
_MEMORY_NAME = re.compile(r"[A-Za-z0-9._-]{0,120}")
_EXAMPLES = "sqlite:///orders.db (a file) or memory:// (this process only)"


@dataclass(frozen=True, slots=True)
class Address:
    path: Path | None = None  # a file; None: in memory
    name: str = ""  # memory only; "": private


def parse(url: str) -> Address:
    if not isinstance(url, str):
        raise InvalidURL(f"an address is text, such as sqlite:///orders.db; not {url!r}{_path_hint(url)}")
    scheme, colon, rest = url.partition(":")
    if not colon or (len(scheme) == 1 and scheme.isalpha()):  # no scheme, or a Windows drive
        raise InvalidURL(f"{url!r} has no scheme: use {_no_scheme_hint(url)}")
    if scheme == "memory":
        return _memory(url, rest)
    if scheme == "sqlite":
        return _sqlite(url, rest)
    raise InvalidURL(_unknown_scheme(url, scheme, rest))


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
    return Address(path=Path(path).expanduser())


def _unknown_scheme(url: str, scheme: str, rest: str) -> str:
    if scheme.lower() in _LATER:
        return f"{scheme}:// addresses are not in this version: use {_EXAMPLES}"
    close = get_close_matches(scheme.lower(), _SCHEMES, n=1, cutoff=0.6)
    if close and close[0] not in _LATER:
        return f"{url!r}: there is no scheme {scheme!r}; did you mean {close[0]}:{rest}?"
    if close:
        return f"{url!r}: no scheme {scheme!r}, and {close[0]}:// is not in this version: use {_EXAMPLES}"
    return f"{url!r}: there is no scheme {scheme!r}: use {_EXAMPLES}"


def _no_scheme_hint(url: str) -> str:
    close = get_close_matches(url.lower(), _SCHEMES[:2], n=1, cutoff=0.7)
    if close:
        return _EXAMPLES
    return f"sqlite:///{url}" if url else _EXAMPLES


def _path_hint(url: object) -> str:
    return f"; did you mean 'sqlite:///{url}'?" if isinstance(url, Path) else ""
