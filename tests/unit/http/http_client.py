"""An app on a queue in memory, and a client that calls it in this process: for the tests of HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from fastapi import FastAPI

from postroom.address import parse
from postroom.broker.access import Gatekeeper, new_token
from postroom.broker.broker import Broker, open_endpoint
from postroom.clock import Clock, SystemClock
from postroom.http.app import HttpLimits, make_app
from postroom.http.service import Service
from postroom.model.access import Principal, hash_of, parse_permissions

__all__ = ["API", "Stage", "staged"]

API = "/api/v1"


@dataclass
class Stage:
    broker: Broker
    app: FastAPI
    client: httpx.AsyncClient
    tokens: dict[str, str] = field(default_factory=dict)

    @property
    def service(self) -> Service:
        found: Service = self.app.state.service
        return found

    def add(self, name: str, *permissions: str) -> None:
        """A principal; `who=` in calls makes them in its name."""
        self.tokens[name] = new_token()
        principal = Principal(name, parse_permissions(permissions))
        self.broker.store.access.add(principal, hash_of(self.tokens[name]))

    async def call(
        self, method: str, path: str, status: int = 200, *, who: str = "", **more: Any
    ) -> httpx.Response:
        headers = dict(more.pop("headers", None) or {})
        if who:
            headers["Authorization"] = f"Bearer {self.tokens[who]}"
        found = await self.client.request(method, path, headers=headers, **more)
        assert found.status_code == status, f"{method} {path}: {found.status_code} {found.text}"
        return found

    async def get(self, path: str, status: int = 200, **more: Any) -> Any:
        return (await self.call("GET", API + path, status, **more)).json()

    async def post(self, path: str, body: Any = None, status: int = 200, **more: Any) -> Any:
        return (await self.call("POST", API + path, status, json=body, **more)).json()

    async def error(self, method: str, path: str, status: int, **more: Any) -> dict[str, Any]:
        """The one shape of errors."""
        found = (await self.call(method, path, status, **more)).json()
        assert list(found) == ["error"]
        error: dict[str, Any] = found["error"]
        assert list(error) == ["code", "message", "retriable", "details"]
        return error


@asynccontextmanager
async def staged(
    *,
    dev: bool = True,
    clock: Clock | None = None,
    limits: HttpLimits | None = None,
    address: str = "memory://",
) -> AsyncIterator[Stage]:
    broker = await open_endpoint(parse(address), clock=clock)
    try:
        gatekeeper = Gatekeeper(broker.store, broker.in_thread, clock or SystemClock(), dev=dev)
        app = make_app(broker, gatekeeper, limits=limits)
        transport = httpx.ASGITransport(app, client=("127.0.0.1", 1234))
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
        ):
            yield Stage(broker, app, client)
    finally:
        await broker.close()
