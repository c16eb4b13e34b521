"""A real Chromium in front of a real broker: for the tests of the console.

Debian's Chromium, driven by Playwright. Whatever a test does, the page has logged no error and asked no other
host, and what is shown is accessible as far as axe can tell. Screenshots are build results: `build/console/`.
Without Chromium the tests are skipped, or fail where CI is set.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import postroom
from postroom.address import parse
from postroom.broker.access import Gatekeeper, new_token
from postroom.broker.broker import open_endpoint
from postroom.broker.served import Servable, measured
from postroom.client.connection import Connection
from postroom.clock import SystemClock
from postroom.console.pages import add_console
from postroom.http.app import make_app
from postroom.http.server import HttpServer, serve_http
from postroom.model.access import Principal, hash_of, parse_permissions

__all__ = ["Desk", "desk"]

SHOTS = Path(__file__).resolve().parents[3] / "build" / "console"
WAIT_MS = 30_000  # what a machine three times as busy keeps
_PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


def _chromium() -> str:
    for name in _PROGRAMS:
        if (found := shutil.which(name)) is not None:
            return found
    said = "Chromium is not installed: make servers, or apt-get install chromium"
    if os.environ.get("CI"):
        pytest.fail(said)
    pytest.skip(said)


@dataclass
class Desk:
    """Somebody at a console."""

    broker: Servable
    mq: Connection  # beside the console, as programs have it
    server: HttpServer
    page: Any
    context: Any
    wrong: list[str] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)  # errors that a test provokes
    tokens: dict[str, str] = field(default_factory=dict)
    elsewhere: str = "data:"  # what else may be asked

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    def add(self, name: str, *permissions: str) -> str:
        """A principal; returns its token."""
        token = self.tokens[name] = new_token()
        self.broker.store.access.add(Principal(name, parse_permissions(permissions)), hash_of(token))
        return token

    async def open(self, path: str = "") -> None:
        """Open a page of the console, without a load if it is open already."""
        await self.page.goto(f"{self.url}/console#/{path}")

    async def log_in(self, name: str) -> None:
        await self.page.goto(f"{self.url}/console")
        await self.page.get_by_label("Token").fill(self.tokens[name])
        await self.page.get_by_role("button", name="Log in").click()
        await self.sees("Log out")

    async def sees(self, text: str | re.Pattern[str]) -> None:
        """Wait for a text."""
        await self.page.get_by_text(text).first.wait_for(timeout=WAIT_MS)

    async def sees_in(self, selector: str, text: str | re.Pattern[str]) -> None:
        """Wait for a text in such an element."""
        await self.page.locator(selector, has_text=text).first.wait_for(timeout=WAIT_MS)

    async def misses(self, text: str | re.Pattern[str]) -> None:
        """Wait until a text is not there any more."""
        await self.page.get_by_text(text).first.wait_for(state="hidden", timeout=WAIT_MS)

    async def press(self, name: str, *, within: Any = None, exact: bool = True) -> None:
        await (within or self.page).get_by_role("button", name=name, exact=exact).click(timeout=WAIT_MS)

    async def text(self) -> str:
        found: str = await self.page.inner_text("body")
        return found

    async def shoot(self, name: str, *, whole: bool = False) -> None:
        """A picture for people, of the whole page or what fits, and a check of what is shown there."""
        await self.check_access(name)
        path = SHOTS / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        await self.page.screenshot(path=path, full_page=whole)

    async def check_access(self, name: str) -> None:
        from axe_playwright_python.async_playwright import Axe

        found = await Axe().run(self.page)
        said = [
            f"{one['id']}: {node['html'][:200]} {node.get('failureSummary', '')}"
            for one in found.response["violations"]
            for node in one["nodes"]
        ]
        assert not said, f"{name} is not accessible: {said}"


@asynccontextmanager
async def desk(
    *,
    dev: bool = True,
    address: str = "memory://",
    shards: dict[str, str] | None = None,
    key: str | None = None,
    change: Callable[[Any], None] | None = None,
    **context: Any,
) -> AsyncIterator[Desk]:
    """`change` is given the app before it is served; `context`: what the browser is, its size or colours."""
    async_api = pytest.importorskip("playwright.async_api")
    program = _chromium()
    others = {name: parse(one) for name, one in (shards or {}).items()}
    endpoint = await open_endpoint(parse(address), migrate=True, shards=others or None)
    broker = measured(endpoint)
    try:
        app = make_app(broker, Gatekeeper(broker.store, broker.in_thread, SystemClock(), dev=dev))
        add_console(app, key=key)
        if change is not None:
            change(app)
        server = await serve_http(app, "127.0.0.1", 0)
        try:
            async with async_api.async_playwright() as playwright:
                chromium = await playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
                found = await chromium.new_context(**context)
                page = await found.new_page()
                page.set_default_timeout(WAIT_MS)
                mq = postroom.Connection(broker, "test")
                one = Desk(broker, mq, server, page, found)
                _watch(one)
                try:
                    yield one
                finally:
                    await chromium.close()
                    await mq.close()
                wrong = [said for said in one.wrong if not any(part in said for part in one.expected)]
                assert not wrong, f"the page said: {wrong}"
        finally:
            await server.stop(1)
    finally:
        await broker.close()


def _watch(one: Desk) -> None:
    def heard(message: Any) -> None:
        if message.type in ("error", "warning"):
            one.wrong.append(f"{message.type}: {message.text}")

    def asked(request: Any) -> None:
        if not request.url.startswith((one.url, one.elsewhere)):
            one.wrong.append(f"asked another host: {request.url}")

    one.page.on("console", heard)
    one.page.on("pageerror", lambda error: one.wrong.append(f"failed: {error}"))
    one.context.on("request", asked)
