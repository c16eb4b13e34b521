"""Which databases a queue has beside its first one: `--shard NAME=URL`, and POSTROOM_SHARDS.

Decides the spelling. An option beats what the environment says of the same name. Must never show what was
written: there may be a password in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..errors import InvalidSetting

__all__ = ["shard_text", "shard_urls"]


def shard_urls(options: Iterable[str], environment: str) -> dict[str, str]:
    """
    >>> shard_urls(["b=sqlite:///b2.db"], "b=sqlite:///b.db, c=postgresql://host/queue")
    {'b': 'sqlite:///b2.db', 'c': 'postgresql://host/queue'}
    """
    parts = [part.strip() for part in environment.split(",") if part.strip()]
    found = _named(
        parts,
        "POSTROOM_SHARDS",
        "write b=URL,c=URL; a comma inside a URL is not allowed there: write %2C for it, or use --shard",
    )
    return found | _named(
        list(options), "--shard", "write a name and a URL, such as --shard b=mysql://host/queue"
    )


def shard_text(urls: Mapping[str, str]) -> str:
    """As POSTROOM_SHARDS has it."""
    return ",".join(f"{name}={url.replace(',', '%2C')}" for name, url in urls.items())


def _named(parts: list[str], where: str, spelling: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for place, part in enumerate(parts, 1):
        name, equals, url = part.partition("=")
        if not (equals and name and "://" in url) or "://" in name:
            raise InvalidSetting(f"{where}, number {place}, is not a shard: {spelling}")
        if name in found:
            raise InvalidSetting(f"{where} names shard {name!r} twice: give each name one database")
        found[name] = url
    return found
