"""How a connection reaches brokers: who it says it is, and whom it trusts.

Must never show a token, in no message and no repr.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ..address import Address
from ..errors import InvalidSetting
from ..tls import client_context

__all__ = ["Reaching", "by_environment", "reaching"]


class Reaching(NamedTuple):
    token: str = ""
    tls: ssl.SSLContext | None = None
    zone: str = ""

    def __repr__(self) -> str:
        return f"Reaching(zone={self.zone!r})"  # never the token


def by_environment() -> Reaching:
    """What POSTROOM_TOKEN and POSTROOM_TLS say: 1, or a file with the authorities to trust."""
    tls = os.environ.get("POSTROOM_TLS", "")
    trusted = None if tls in ("", "0") else client_context(True if tls == "1" else tls)
    return Reaching(os.environ.get("POSTROOM_TOKEN", ""), trusted)


def reaching(
    address: Address,
    token: str | None,
    tls: bool | str | Path | ssl.SSLContext | None,
    zone: str | None,
    *,
    shards: Mapping[str, Address],
    migrate: bool,
) -> Reaching:
    """What was given to `connect`; the rest is as the environment says.

    InvalidSetting if something for brokers was given with a database, or the other way round.
    """
    if address.kind != "postroom":
        if token is not None or tls or zone:
            raise InvalidSetting("token=, tls= and zone= are for brokers (postroom://…), not for a database")
        return Reaching()
    if shards or migrate:
        raise InvalidSetting("shards= and migrate= are for databases: a broker's own settings name them")
    found = by_environment()
    if token is not None:
        found = found._replace(token=_checked(token))
    if tls is not None:
        found = found._replace(tls=client_context(tls))
    return found._replace(zone=zone or "")


def _checked(token: str) -> str:
    if not isinstance(token, str) or not token.isascii() or not token.isprintable():
        raise InvalidSetting("token: the text that `postroom access add` has shown; it begins with pst_")
    return token
