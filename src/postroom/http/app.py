"""The app: what is served over HTTP beside a broker, put together.

    /health /ready          without authentication
    /metrics                for Prometheus: any principal
    /api/v1/…               topics, groups, routes, shards, rates, brokers, sending and polling
    /docs /openapi.json     what there is; without authentication

Decides nothing: the handlers are in modules of their own, who may come in is `limits.Door`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ..broker.access import Gatekeeper
from ..broker.metered import unmeasured
from ..broker.served import Servable
from ..errors import UsageError, how_to_install
from ..wire.server.server import WireServer

try:
    from fastapi import Depends, FastAPI, Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse
    from fastapi.security import HTTPBearer
    from prometheus_client import CollectorRegistry  # noqa: F401
    from starlette.exceptions import HTTPException
except ModuleNotFoundError as missing:
    raise UsageError(
        f"HTTP needs a package that is not installed ({missing.name}): {how_to_install('server')}"
    ) from missing

from ..errors import PostroomError
from . import reference
from .failures import failure
from .middleware import API, Door, HttpLimits
from .routes import groups, health, metrics, polling, queue, sending, topics
from .routes.sampling import Sampler
from .service import Service

__all__ = ["make_app"]

_ABOUT = 'Every error is `{"error": {"code", "message", "retriable", "details"}}`.'


def make_app(
    broker: Servable,
    gatekeeper: Gatekeeper,
    *,
    server: WireServer | None = None,
    limits: HttpLimits | None = None,
) -> FastAPI:
    """The broker should be a measured one, and the same as the server's: then /metrics counts both."""
    service = Service(broker, gatekeeper, server)
    app = FastAPI(
        title="Postroom",
        description=_ABOUT,
        version="1",
        lifespan=service.lifespan,
        docs_url=None,  # a page of our own: `reference`
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.service = service
    app.state.readiness = health.Readiness(service)
    app.state.metrics = metrics.Metrics(service, Sampler(unmeasured(service.broker)))
    app.add_middleware(Door, service=service, limits=limits or HttpLimits())
    for kind in (PostroomError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _failed)
    app.include_router(health.router)
    app.include_router(metrics.router)
    app.include_router(reference.router)
    shown = [Depends(HTTPBearer(auto_error=False))]  # for /docs: who it is was decided at the door
    for part in (topics, groups, sending, polling, queue):
        app.include_router(part.router, prefix=API, dependencies=shown)
    setattr(app, "openapi", partial(_described, app.openapi))  # noqa: B010
    return app


def _described(made: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    found = made()
    found["components"]["schemas"].update(sending.SCHEMAS)
    return found


async def _failed(request: Request, error: Exception) -> JSONResponse:
    return failure(error)
