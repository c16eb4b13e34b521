"""Names by which a broker is configured, watched and called: settings, metrics, HTTP, permissions."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from collections.abc import Iterable
from typing import Any

from . import internals
from .citations import SOURCE

__all__ = ["http_api_text", "metrics_text", "names_text"]

_VARIABLE = re.compile(r"\bPOSTROOM_[A-Z]+(?:_[A-Z]+)*\b")
_LOGGER = re.compile(r"getLogger\(\s*\"(postroom[\w.]*)\"")
_PROSE = ("description", "summary", "title")


def metrics_text() -> str:
    """Name, type and labels of each metric; a counter's sample has `_total` behind its name."""

    async def families() -> list[str]:
        async with internals.served() as (app, client):
            shown = (await client.get("/metrics")).text
            lines = []
            for name, kind, labels in internals.metric_families(app):
                assert "(relay)" in name or f"# TYPE {name}" in shown, f"/metrics does not show {name}"
                lines.append(f"{name} {kind} {{{', '.join(labels)}}}")
            return sorted(lines)

    return _lines(asyncio.run(families()))


def http_api_text() -> str:
    """The OpenAPI document without its prose."""

    async def document() -> Any:
        async with internals.served() as (_, client):
            return (await client.get("/openapi.json")).json()

    found = _without_prose(asyncio.run(document()))
    return json.dumps(found, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _without_prose(value: Any, *, names: bool = False) -> Any:
    """`names`: the keys are names, of fields or schemas, and no words of the format."""
    if isinstance(value, list):
        return [_without_prose(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _without_prose(one, names=key in ("properties", "schemas") and not names)
        for key, one in value.items()
        if names or key not in _PROSE or isinstance(one, dict)
    }


def names_text() -> str:
    sections: dict[str, list[str]] = {
        "settings of a served broker: in the file, default": [
            f"{internals.key_of(one.name)} {one.metadata['kind']} = {_default(one)}"
            for one in dataclasses.fields(internals.ServeSettings)
        ],
        "environment variables": sorted(
            {f"POSTROOM_SERVE_{internals.key_of(one.name).upper()}" for one in _serve_fields()}
            | _found(_VARIABLE)
        ),
        "limits, default": [
            f"{one.name} = {getattr(internals.DEFAULTS, one.name)!r}"
            for one in dataclasses.fields(internals.DEFAULTS)
            if one.repr  # heuristics are nobody's promise
        ],
        "settings of a topic, as stored": _fields(internals.TopicSettings),
        "settings of a group, as stored": _fields(internals.GroupSettings),
        "permissions": [*internals.PERMISSIONS],
        "what each operation needs": sorted(f"{name}: {need}" for name, need in internals.NEEDS.items()),
        "loggers": sorted(_found(_LOGGER)),
    }
    return _lines(
        line for title, entries in sections.items() for line in ("", f"== {title}", *entries)
    ).lstrip("\n")


def _serve_fields() -> Iterable[dataclasses.Field[Any]]:
    """Those that the environment may set: the address and the shards have variables of every command."""
    return (one for one in dataclasses.fields(internals.ServeSettings) if one.name not in ("url", "shards"))


def _default(field: dataclasses.Field[Any]) -> str:
    made = field.default_factory
    return repr(field.default if made is dataclasses.MISSING else made())


def _fields(kind: Any) -> list[str]:
    return [f"{one.name} = {_default(one)}" for one in dataclasses.fields(kind)]


def _found(pattern: re.Pattern[str]) -> set[str]:
    texts = (path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py"))
    found = (match for text in texts for match in pattern.finditer(text))
    return {next(filter(None, match.groups()), match[0]) for match in found}


def _lines(lines: Iterable[str]) -> str:
    return "\n".join(lines) + "\n"
