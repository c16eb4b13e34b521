"""The start of a broker: the first token, made once and shown to whoever made it; HTTP that is not there."""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from postroom.cli.operate import serve
from postroom.cli.operate.serve import make_http, show_first_token
from postroom.errors import UsageError
from postroom.model.access import ALL, Principal, hash_of
from postroom.serve_settings import ServeSettings
from postroom.store import open_memory
from postroom.store.contract import Store
from postroom.wire.server.server import WireServer

URL = "postroom://here:7070"


def broker_on(store: Store, **patched: Any) -> Any:
    access = SimpleNamespace(principals=store.access.principals, add=store.access.add)
    vars(access).update(patched)
    return SimpleNamespace(store=SimpleNamespace(access=access), in_thread=asyncio.to_thread)


async def test_it_is_made_once(capsys: pytest.CaptureFixture[str]) -> None:
    store = open_memory()
    await show_first_token(broker_on(store), URL, as_json=False)
    shown = capsys.readouterr().out
    (token,) = (line.partition("=")[2] for line in shown.splitlines() if "POSTROOM_TOKEN=" in line)
    assert f"POSTROOM_URL={URL}" in shown
    assert store.access.by_secret(hash_of(token)) == Principal(
        "admin", ALL, store.access.principals()[0].created_at
    )
    await show_first_token(broker_on(store), URL, as_json=False)
    assert capsys.readouterr().out == ""
    store.close()


async def test_any_principal_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    store = open_memory()
    store.access.add(Principal("shop", ()), "")
    await show_first_token(broker_on(store), URL, as_json=True)
    assert capsys.readouterr().out == "" and len(store.access.principals()) == 1
    store.close()


async def test_another_broker_was_started_in_the_same_moment(capsys: pytest.CaptureFixture[str]) -> None:
    """It had made its principal when we looked already: its token is the one that counts."""
    store = open_memory()
    store.access.add(Principal("admin", ALL), "theirs")
    await show_first_token(broker_on(store, principals=list), URL, as_json=True)
    assert capsys.readouterr().out == "" and store.access.by_secret("theirs") is not None
    store.close()


def test_without_the_extra_there_is_no_http(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    for name in [name for name in sys.modules if name.startswith(("postroom.http", "uvicorn."))]:
        monkeypatch.delitem(sys.modules, name)
    caplog.set_level("INFO", "postroom")
    nothing: Any = None
    assert make_http(nothing, nothing, ServeSettings()) is None
    assert "pip install '.[server]'" in caplog.text
    caplog.clear()
    assert make_http(nothing, nothing, ServeSettings(http_port=0)) is None
    assert caplog.text == ""


async def test_nobody_can_come_before_everything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first greeting is answered at once: what takes long was done before the port listens."""
    settings = ServeSettings(url="memory://", dev=True, port=0)
    order: list[str] = []
    made = serve.make_http

    def noted(*args: Any) -> Any:
        order.append("http")
        return made(*args)

    async def start(self: WireServer) -> None:
        order.append("listen")
        assert "fastapi" in sys.modules and "uvicorn" in sys.modules
        raise UsageError("far enough")

    monkeypatch.setattr(serve, "make_http", noted)
    monkeypatch.setattr(WireServer, "start", start)
    with pytest.raises(UsageError, match="far enough"):
        await serve._serve(settings, serve.listening(settings), lambda: settings, as_json=False)
    assert order == ["http", "listen"]
