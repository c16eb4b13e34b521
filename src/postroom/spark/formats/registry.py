"""A schema registry, by the interface of Confluent's: schemas by id, and the latest one of a subject.

What an id means never changes, so it is asked once in a process. An answer is bounded in size and time.
Must never show a password or a token: they are in no repr and in no message, and go to no other host.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from time import monotonic, sleep
from typing import Any, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from ...config import DEFAULTS, SparkTuning
from ...errors import UsageError
from .arrow import Unreadable

__all__ = ["HEADER_BYTES", "Registered", "Registry", "header"]

HEADER_BYTES = 5
"""Of each value that was written with a registry: a zero, and the id of its schema."""

_BYTES = 4 << 20  # of an answer
_KEPT = 1_000  # schemas in memory
_REFERENCES = 100  # of a schema, those of its references among them
_AGAIN = (429, 500, 502, 503, 504)
_KINDS = {"avro": "AVRO", "protobuf": "PROTOBUF", "json": "JSON"}


@dataclass(frozen=True, slots=True)
class Registered:
    """A schema, and those it refers to, in the order in which they need each other, by the name it uses."""

    text: str
    references: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Registry:
    url: str
    kind: str  # avro, protobuf, json
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    tuning: SparkTuning = field(default=DEFAULTS.tuning.spark, repr=False, compare=False)

    def latest(self, subject: str) -> Registered:
        path = f"/subjects/{quote(subject, safe='')}/versions/latest"
        found = self._ask(path)
        if found is None:
            raise self._failed(
                f"there is no subject {subject!r}: name the subject with the option schemaSubject, or give "
                "the schema with valueSchema"
            )
        return self._registered(found, f"subject {subject!r}")

    def by_id(self, number: int) -> Registered:
        """Unreadable: there is no such schema, or it is of another kind."""
        key = (self, number)
        known = _known.get(key)
        if known is None or known.until < monotonic():
            known = self._look_up(number)
            _known[key] = known
            while len(_known) > _KEPT:
                del _known[next(iter(_known))]
        if isinstance(known.found, str):
            raise Unreadable(known.found)
        return known.found

    def _look_up(self, number: int) -> _CachedSchema:
        try:
            found = self._ask(f"/schemas/ids/{number}")
            if found is None:
                raise Unreadable(f"the registry has no schema {number}")
            return _CachedSchema(self._registered(found, f"schema {number}"), inf)
        except Unreadable as error:  # it may come yet; and messages with the same id are many
            return _CachedSchema(str(error), monotonic() + self.tuning.registry_again_s)

    # ---- answers ----

    def _registered(self, found: Mapping[str, Any], what: str) -> Registered:
        kind = found.get("schemaType", "AVRO")
        if kind != _KINDS[self.kind]:
            raise Unreadable(f"{what} is of type {kind}, and valueFormat is {self.kind}")
        listed: dict[str, str] = {}
        self._gather(found, listed)
        return Registered(_text(found, what), tuple(listed.items()))

    def _gather(self, found: Mapping[str, Any], listed: dict[str, str]) -> None:
        """Those that others need come first."""
        for one in found.get("references") or ():
            name, subject, version = one.get("name"), one.get("subject"), one.get("version")
            if name in listed:
                continue
            if len(listed) >= _REFERENCES:
                raise Unreadable(f"a schema refers to more than {_REFERENCES} others")
            path = f"/subjects/{quote(str(subject), safe='')}/versions/{quote(str(version), safe='')}"
            there = self._ask(path)
            if there is None:
                raise Unreadable(
                    f"a schema refers to {subject} version {version}, which the registry has not"
                )
            listed[name] = ""  # a circle ends here
            self._gather(there, listed)
            del listed[name]
            listed[name] = _text(there, f"{subject} version {version}")

    def _ask(self, path: str) -> dict[str, Any] | None:
        """None: there is no such thing."""
        asked = f"{path}?format=serialized" if self.kind == "protobuf" else path
        for pause in (*self.tuning.registry_pauses_s, None):
            try:
                return self._once(asked)
            except HTTPError as error:
                error.close()
                if error.code == 404:
                    return None
                if error.code in (401, 403):
                    raise self._failed(
                        f"it refuses ({error.code}): give schemaRegistryUser and schemaRegistryPassword, or "
                        "schemaRegistryToken, that may read its schemas"
                    ) from None
                if error.code not in _AGAIN or pause is None:
                    raise self._failed(f"it answers {error.code} to {path}: check the address") from None
            except (OSError, URLError) as error:
                if pause is None:
                    why = getattr(error, "reason", None) or error
                    raise self._failed(f"it cannot be reached ({why}): check that it runs") from None
            sleep(pause)
        raise AssertionError

    def _once(self, path: str) -> dict[str, Any]:
        request = Request(self.url.rstrip("/") + path, headers={"Accept": "application/json"})
        if self.token is not None:
            request.add_unredirected_header("Authorization", f"Bearer {self.token}")
        elif self.user is not None:
            pair = base64.b64encode(f"{self.user}:{self.password or ''}".encode()).decode()
            request.add_unredirected_header("Authorization", f"Basic {pair}")
        with build_opener(_NoRedirect).open(request, timeout=self.tuning.registry_s) as answer:
            body = answer.read(_BYTES + 1)
        if len(body) > _BYTES:
            raise self._failed(f"its answer to {path} has more than {_BYTES >> 20} MB")
        try:
            found = json.loads(body)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise self._failed(f"its answer to {path} is no JSON object: is that a schema registry?")
        return found

    def _failed(self, text: str) -> UsageError:
        return UsageError(f"option schemaRegistry: {urlsplit(self.url).netloc}: {text}")


class _NoRedirect(HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        """Not followed: name the registry by the address it has."""


def _text(found: Mapping[str, Any], what: str) -> str:
    text = found.get("schema")
    if not isinstance(text, str):
        raise Unreadable(f"{what} has no schema in it: is that a schema registry?")
    return text


class _CachedSchema(NamedTuple):
    found: Registered | str  # or why there is none
    until: float


_known: dict[tuple[Registry, int], _CachedSchema] = {}


def header(value: bytes) -> int:
    """The id of the schema that a value was written with."""
    if len(value) < HEADER_BYTES or value[0] != 0:
        raise Unreadable("it does not begin as a message of a schema registry: a zero byte, and an id")
    return int.from_bytes(value[1:HEADER_BYTES], "big")
