"""TLS: what is spoken, who is believed, and files that cannot be used."""

from __future__ import annotations

import ssl
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from postroom.errors import InvalidSetting
from postroom.serve_settings import ServeSettings
from postroom.tls import certificate_name, client_context, server_context
from tests.certificates import Authority


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


def talk(server: ssl.SSLContext | None, client: ssl.SSLContext | None) -> tuple[str | None, str | None]:
    """A handshake without a network: the client's name as the server sees it, and the version spoken."""
    assert server is not None and client is not None
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        client.wrap_bio(down, up, server_hostname="127.0.0.1"),
        server.wrap_bio(up, down, server_side=True),
    ]
    for _ in range(4):
        for side in sides:
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
    return certificate_name(sides[1].getpeercert()), sides[1].version()


@pytest.fixture
def server(authority: Authority) -> ServeSettings:
    pair = authority.issue("mq")
    return ServeSettings(tls_cert=pair.cert, tls_key=pair.key, tls_client_ca=authority.ca)


def test_a_client_that_knows_the_authority(authority: Authority, server: ServeSettings) -> None:
    name, version = talk(server_context(server), client_context(authority.ca))
    assert name is None and version == "TLSv1.3"


def test_a_client_with_a_certificate_has_its_name(authority: Authority, server: ServeSettings) -> None:
    pair = authority.issue("shop")
    client = client_context(Path(authority.ca), cert=pair.cert, key=pair.key)
    assert (talk(server_context(server), client))[0] == "shop"


def test_a_client_that_does_not_know_the_authority(server: ServeSettings) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        talk(server_context(server), client_context(True))


def test_a_server_that_does_not_know_the_clients_authority(
    server: ServeSettings, authority: Authority, tmp_path: Path
) -> None:
    pair = Authority(tmp_path, "other").issue("shop")
    client = client_context(authority.ca, cert=pair.cert, key=pair.key)
    with pytest.raises(ssl.SSLCertVerificationError):
        talk(server_context(server), client)


def test_nothing_older_than_tls_1_2(authority: Authority, server: ServeSettings) -> None:
    context = server_context(server)
    client = client_context(authority.ca)
    assert context is not None and client is not None
    assert context.minimum_version == client.minimum_version == ssl.TLSVersion.TLSv1_2
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    assert (talk(context, client))[1] == "TLSv1.2"


def test_without_tls() -> None:
    assert server_context(ServeSettings()) is None
    assert client_context(None) is None and client_context(False) is None
    own = ssl.create_default_context()
    assert client_context(own) is own
    assert certificate_name(None) is None and certificate_name({}) is None


@pytest.mark.parametrize("tls", [7, 0.5, b"ca.pem"])
def test_what_is_no_tls(tls: Any) -> None:
    with pytest.raises(InvalidSetting, match="an SSLContext"):
        client_context(tls)


def test_files_that_cannot_be_used(authority: Authority, tmp_path: Path) -> None:
    one, other = authority.issue("one"), authority.issue("other")
    hidden = authority.issue("hidden", password=b"hunter2")
    text = tmp_path / "text.pem"
    text.write_text("nothing of the kind")
    for cert, key in [
        (str(tmp_path / "no.pem"), one.key),
        (one.cert, str(tmp_path / "no.pem")),
        (one.cert, other.key),
        (hidden.cert, hidden.key),
        (str(text), one.key),
    ]:
        with pytest.raises(
            InvalidSetting, match="PEM files that belong together, the key without a password"
        ):
            server_context(ServeSettings(tls_cert=cert, tls_key=key))
    for ca in (str(tmp_path / "no.pem"), str(text)):
        with pytest.raises(InvalidSetting, match="tls_client_ca cannot be used"):
            server_context(ServeSettings(tls_cert=one.cert, tls_key=one.key, tls_client_ca=ca))
        with pytest.raises(InvalidSetting, match="tls cannot be used"):
            client_context(ca)
    with pytest.raises(InvalidSetting, match="name both files"):
        client_context(authority.ca, cert=one.cert)
    with pytest.raises(InvalidSetting, match="takes TLS"):
        client_context(None, cert=one.cert, key=one.key)
