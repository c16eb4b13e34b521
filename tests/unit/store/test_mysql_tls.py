"""Connections to MariaDB that ask for no certificate share what TLS needs: to make it takes 20 ms of CPU."""

from __future__ import annotations

import ssl
from pathlib import Path

from postroom.store.dialects.mysql import _Connection
from tests.certificates import Authority


def test_what_tls_needs_is_made_once_where_anybody_is_trusted() -> None:
    one, two = _Connection(defer_connect=True), _Connection(defer_connect=True)
    assert one.ctx is two.ctx and one.ctx.verify_mode == ssl.CERT_NONE
    assert not one._ssl_required  # a server without it is spoken to as well


def test_a_certificate_that_is_asked_for_is_asked_for(tmp_path: Path) -> None:
    _Connection(defer_connect=True)
    authority = Authority(tmp_path).ca
    asks = _Connection(defer_connect=True, ssl_ca=authority, ssl_verify_cert=True)
    assert asks.ctx.verify_mode == ssl.CERT_REQUIRED and asks._ssl_required
    assert len(asks.ctx.get_ca_certs()) == 1
    assert _Connection(defer_connect=True).ctx.verify_mode == ssl.CERT_NONE
