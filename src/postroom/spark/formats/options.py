"""What may be written about the format of keys and values when a topic is read.

Turns it into one typed value, and refuses what is contradictory, with the option's name and what to write
instead. Opens nothing. Must never show a password or a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar
from urllib.parse import urlsplit

from ..options import FORMATS, bad_option
from .registry import Registry

__all__ = ["FormatOptions", "Kind", "format_options"]

T = TypeVar("T")

Kind = Literal["binary", "string", "json", "avro", "protobuf"]

_KINDS: dict[str, Kind] = {
    "binary": "binary",
    "string": "string",
    "json": "json",
    "avro": "avro",
    "protobuf": "protobuf",
}
_WITH_SCHEMA = ("json", "avro", "protobuf")
_OF_REGISTRY = ("schemaSubject", "schemaRegistryUser", "schemaRegistryPassword", "schemaRegistryToken")


@dataclass(frozen=True, slots=True)
class FormatOptions:
    kind: Kind = "binary"
    schema: str = ""  # as it is written
    message: str = ""
    registry: Registry | None = None
    subject: str = ""
    text_keys: bool = False
    keep_bad: bool = False  # a value that cannot be read is null, with the reason beside it

    @property
    def raw(self) -> bool:
        """Bytes, as they are."""
        return self.kind == "binary" and not self.text_keys


def format_options(options: Mapping[str, str]) -> FormatOptions:
    names = {name.lower(): name for name in FORMATS}
    given = {names[n.lower()]: str(v).strip() for n, v in options.items() if n.lower() in names}
    kind = _choice(given, "valueFormat", _KINDS, "binary")
    text_keys = _choice(given, "keyFormat", {"binary": False, "string": True}, False)
    for name in ("valueSchema", "schemaRegistry"):
        if name in given and kind not in _WITH_SCHEMA:
            raise bad_option(name, f"it goes with valueFormat, one of {', '.join(_WITH_SCHEMA)}: give both")
    if "valueMessage" in given and kind != "protobuf":
        raise bad_option("valueMessage", "it goes with valueFormat=protobuf: leave it out")
    if "valueErrors" in given and kind == "binary" and not text_keys:
        raise bad_option("valueErrors", "it goes with valueFormat or keyFormat: bytes can always be read")
    registry = _registry(given, kind)
    if kind in ("avro", "protobuf") and "valueSchema" not in given and registry is None:
        what = "an Avro schema" if kind == "avro" else "a descriptor set, a file that protoc has written"
        raise bad_option("valueSchema", f"it is missing: give {what}, or schemaRegistry")
    return FormatOptions(
        kind=kind,
        schema=given.get("valueSchema", ""),
        message=given.get("valueMessage", ""),
        registry=registry,
        subject=_subject(given, options) if registry is not None and "valueSchema" not in given else "",
        text_keys=text_keys,
        keep_bad=_choice(given, "valueErrors", {"fail": False, "null": True}, False),
    )


def _choice(given: Mapping[str, str], name: str, choices: Mapping[str, T], otherwise: T) -> T:
    if name not in given:
        return otherwise
    if given[name].lower() not in choices:
        raise bad_option(name, f"{given[name]!r}: choose one of {', '.join(choices)}")
    return choices[given[name].lower()]


def _registry(given: Mapping[str, str], kind: str) -> Registry | None:
    url = given.get("schemaRegistry")
    if url is None:
        for name in _OF_REGISTRY:
            if name in given:
                raise bad_option(name, "it goes with schemaRegistry: give both, or neither")
        return None
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        fits = False
    if not fits or parts.query or parts.fragment:
        raise bad_option("schemaRegistry", "write an address such as https://registry:8081")
    if parts.username is not None or parts.password is not None:
        raise bad_option(
            "schemaRegistry",
            "the address has a password in it, which would be shown: use schemaRegistryUser and "
            "schemaRegistryPassword",
        )
    user, password = given.get("schemaRegistryUser"), given.get("schemaRegistryPassword")
    token = given.get("schemaRegistryToken")
    if (user is None) != (password is None):
        missing = "schemaRegistryPassword" if password is None else "schemaRegistryUser"
        raise bad_option(missing, "it is missing: user and password go together")
    if user is not None and token is not None:
        raise bad_option("schemaRegistryToken", "it contradicts schemaRegistryUser: give one of them")
    return Registry(url, kind, user, password, token)


def _subject(given: Mapping[str, str], options: Mapping[str, str]) -> str:
    if "schemaSubject" in given:
        return given["schemaSubject"]
    listed = next((value for name, value in options.items() if name.lower() == "subscribe"), "")
    topics = [name.strip() for name in listed.split(",") if name.strip()]
    if len(topics) != 1:
        raise bad_option(
            "schemaSubject",
            "it is missing: where not one topic alone is read, name the subject that all are read with",
        )
    return f"{topics[0]}-value"
