"""What connections to MariaDB do beyond PyMySQL: TLS that is cheap to begin, and packets of its own."""

from __future__ import annotations

import ssl
import struct
from pathlib import Path

import pytest

from postroom.store.dialects.mysql_connection import MysqlConnection, execution
from tests.certificates import Authority


def test_what_tls_needs_is_made_once_where_anybody_is_trusted() -> None:
    one, two = MysqlConnection(defer_connect=True), MysqlConnection(defer_connect=True)
    assert one.ctx is two.ctx and one.ctx.verify_mode == ssl.CERT_NONE
    assert not one._ssl_required  # a server without it is spoken to as well


def test_a_certificate_that_is_asked_for_is_asked_for(tmp_path: Path) -> None:
    MysqlConnection(defer_connect=True)
    authority = Authority(tmp_path).ca
    asks = MysqlConnection(defer_connect=True, ssl_ca=authority, ssl_verify_cert=True)
    assert asks.ctx.verify_mode == ssl.CERT_REQUIRED and asks._ssl_required
    assert len(asks.ctx.get_ca_certs()) == 1
    assert MysqlConnection(defer_connect=True).ctx.verify_mode == ssl.CERT_NONE


def test_a_prepared_statement_is_run_by_one_packet() -> None:
    packet = execution(7, (1, b"abc", -2))
    assert packet == (
        b"\x26\0\0\0"  # its size and number
        b"\x17\x07\0\0\0\0\x01\0\0\0"  # run statement 7, once
        b"\0\x01\x08\0\xfc\0\x08\0"  # none is NULL; types
        b"\x01\0\0\0\0\0\0\0" + b"\x03abc" + b"\xfe" + b"\xff" * 7
    )


@pytest.mark.parametrize(
    ("size", "told"),
    [(0, b"\0"), (250, b"\xfa"), (251, b"\xfc\xfb\0"), (65_535, b"\xfc\xff\xff"), (65_536, b"\xfd\0\0\x01")],
)
def test_the_size_of_bytes_is_told_before_them(size: int, told: bytes) -> None:
    packet = execution(1, (b"x" * size,))
    assert packet.endswith(b"\xfc\0" + told + b"x" * size)
    assert struct.unpack("<I", packet[:4])[0] == len(packet) - 4
