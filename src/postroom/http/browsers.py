"""Browsers: what every answer tells them, and whose pages may use a broker without a token of their own.

A browser adds a client's certificate, or the address of this machine, to requests of any page it shows. So
where one of these is all that says who somebody is, the page must be this broker's own: its scheme, its name
and its port (`refuse_pages`). A token is not added by itself: whoever has one meant it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from ..errors import PermissionDenied
from ..serve_settings import is_loopback

__all__ = ["HEADERS", "careful", "refuse_pages"]

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_POLICY = b"content-security-policy"
HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (_POLICY, b"default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"),
)
"""On every answer; one that has a policy of its own keeps it."""

_OWN = (
    "same-origin",
    "none",
)  # what browsers say of pages of the same site, and of addresses that were typed
_PORTS = {"http": 80, "https": 443}


def careful(send: Send) -> Send:
    """Sends with `HEADERS`."""

    async def sending(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            own = list(message.get("headers", ()))
            there = {name for name, _ in own}
            message["headers"] = [*own, *(one for one in HEADERS if one[0] not in there)]
        await send(message)

    return sending


def refuse_pages(scope: Mapping[str, Any], headers: Mapping[bytes, bytes], *, dev: bool) -> None:
    """PermissionDenied for a page of another site; with `dev` also for names that are not this machine's."""
    host = headers.get(b"host", b"").decode("latin-1")
    origin, site = headers.get(b"origin"), headers.get(b"sec-fetch-site")
    own = _place(f"{scope.get('scheme', 'http')}://{host}")
    foreign = origin is not None and (own is None or _place(origin.decode("latin-1")) != own)
    foreign = foreign or (site is not None and site.decode("latin-1").lower() not in _OWN)
    if dev and (foreign or own is None or not is_loopback(own[1])):
        raise PermissionDenied(
            "this broker was started with --dev and takes requests without a token from this machine only: "
            "call it by 127.0.0.1 or localhost, and not from another site's page"
        )
    if foreign:
        raise PermissionDenied(
            "a page of another site cannot use a client's certificate: call this broker from its own origin, "
            "from a program, or with a token"
        )


def _place(address: str) -> tuple[str, str, int | None] | None:
    """Scheme, name and port of an origin; None: it is none."""
    try:
        found = urlsplit(address)
        if not found.hostname:
            return None
        return found.scheme, found.hostname, found.port or _PORTS.get(found.scheme)
    except ValueError:
        return None
