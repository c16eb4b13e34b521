"""TLS of served brokers and their clients, on `ssl` of the standard library.

Decides what is spoken: TLS 1.2 or newer, nothing else. A client checks the broker's certificate and name
unless it is given a context of its own. A broker that has a `client_ca` asks for certificates and accepts
clients without one, who then need a token; the name of a client with one is the CN of its certificate.
"""

from __future__ import annotations

import re
import ssl
from pathlib import Path
from typing import Any

from .errors import InvalidSetting
from .serve_settings import ServeSettings

__all__ = ["certificate_name", "client_context", "server_context"]

_PLACE = re.compile(r"\s*\(_ssl\.c:\d+\)")


def server_context(settings: ServeSettings) -> ssl.SSLContext | None:
    """None: without TLS."""
    if not settings.tls_cert:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load_chain(context, settings.tls_cert, settings.tls_key, "tls_cert and tls_key")
    if settings.tls_client_ca:
        _load_authorities(context, settings.tls_client_ca, "tls_client_ca")
        context.verify_mode = ssl.CERT_OPTIONAL
    return context


def client_context(
    tls: bool | str | Path | ssl.SSLContext | None,
    *,
    cert: str | Path | None = None,
    key: str | Path | None = None,
) -> ssl.SSLContext | None:
    """`tls` of `connect`: True (the system's authorities), a file of authorities, or a context.

    `cert` and `key` are the client's own certificate, in place of a token.
    """
    if tls is None or tls is False:
        if cert or key:
            raise InvalidSetting("a client's certificate takes TLS: connect with tls=True, or tls='ca.pem'")
        return None
    if isinstance(tls, ssl.SSLContext):
        return tls
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if tls is not True:
        if not isinstance(tls, str | Path):
            raise InvalidSetting(f"tls={tls!r}: True, a file with authorities ('ca.pem'), or an SSLContext")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        _load_authorities(context, tls, "tls")
    if cert or key:
        if not (cert and key):
            raise InvalidSetting("a client's certificate and its key come together: name both files")
        _load_chain(context, cert, key, "the client's certificate and key")
    return context


def certificate_name(certificate: Any) -> str | None:
    """The CN of what `SSLSocket.getpeercert` gave; None without one."""
    for part in (certificate or {}).get("subject", ()):
        for name, value in part:
            if name == "commonName":
                return str(value)
    return None


def _load_chain(context: ssl.SSLContext, cert: str | Path, key: str | Path, what: str) -> None:
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except OSError as error:  # an SSLError is one, too
        raise InvalidSetting(
            f"{what} cannot be used ({_why(error)}): {cert} and {key} have to be PEM files that belong "
            "together, the key without a password"
        ) from None


def _load_authorities(context: ssl.SSLContext, path: str | Path, what: str) -> None:
    try:
        context.load_verify_locations(cafile=path)
    except OSError as error:
        raise InvalidSetting(
            f"{what} cannot be used ({_why(error)}): {path} has to be a PEM file with the certificates of "
            "authorities"
        ) from None


def _no_password() -> str:
    """Never ask on the terminal."""
    return ""


def _why(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return _PLACE.sub("", str(error.reason or error)).replace("_", " ").lower()
    return error.strerror or str(error)
