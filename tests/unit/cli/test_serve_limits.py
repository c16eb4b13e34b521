"""How many connections a process has files for."""

from __future__ import annotations

import pytest

from postroom.cli.operate.serve import Fitted, fitted
from postroom.serve_settings import ServeSettings

TLS = {"tls_cert": "c.pem", "tls_key": "k.pem"}


@pytest.mark.parametrize("files", [None, 65536, 12_000])
def test_where_there_are_enough_files_the_settings_count(files: int | None) -> None:
    assert fitted(files, ServeSettings()) == Fitted(10_000, 1000, 256)
    assert fitted(files, ServeSettings(http_port=0)) == Fitted(10_000, 0, 256)


@pytest.mark.parametrize("files", [1, 64, 256, 1024, 4096, 11_000])
@pytest.mark.parametrize("settings", [ServeSettings(), ServeSettings(http_port=0), ServeSettings(**TLS)])
def test_what_is_allowed_fits_into_the_files(files: int, settings: ServeSettings) -> None:
    found = fitted(files, settings)
    assert found.wire >= 8 and (found.http >= 8) == bool(settings.http_port)
    handshakes = 2 * found.handshakes if settings.tls else 0
    if files >= 256:
        assert found.wire + found.http + handshakes + 100 <= files
    assert found.wire < settings.max_connections or files == 11_000
