"""The console's own files, its log-in, and what is added to an app that gets a console.

    /console                    the page; needs no log-in, and has nothing of the queue in it
    /console/static/…           its scripts and styles: files of this package, and nothing else
    /console/login /logout      a token for a cookie, and back
    /console/session            who one is
    /console/data/…             figures and messages: `figures`, `browsing`, `dead_letters`

The policy of the page lets it load what comes from this broker, and nothing from anywhere else; no script or
style may be in its text, and no text becomes HTML. What changes something goes through the API, which knows a
log-in's cookie as it knows a token, so that permissions are those of the table of operations.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any, cast

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse, RedirectResponse

from ..config import DEFAULTS
from ..endpoint.operations import OPERATIONS
from ..errors import NotAuthenticated
from ..http.failures import BadRequest
from ..http.service import Service, Who
from ..model.access import allows
from .browsing import browsing_router
from .dead_letters import dead_letters_router
from .figures import figures_router
from .logins import SessionLogins, read_secret, set_cookie
from .sampling import Sampler

__all__ = ["add_console"]

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
)
_KINDS = {
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
    "html": "text/html; charset=utf-8",
}

pages_router = APIRouter(prefix="/console", include_in_schema=False)


def add_console(app: FastAPI, *, key: str | None = None) -> None:
    """Add the console to an app of `http.app`. `key`: what opens it in place of a token, once."""
    service = cast(Service, app.state.service)
    service.logins = app.state.logins = SessionLogins(service.gatekeeper, key=key)
    app.state.sampler = sampler = Sampler(service.broker)
    app.state.console_files = _files()
    service.background.append(sampler.run)
    service.open |= {"/", "/console", "/console/login", "/favicon.ico"}
    service.open |= {f"/console/static/{name}" for name in app.state.console_files}
    app.add_api_route("/", _to_console, include_in_schema=False)
    app.add_api_route("/favicon.ico", _icon, include_in_schema=False)
    for router in (pages_router, figures_router, browsing_router, dead_letters_router):
        app.include_router(router)


def _files() -> dict[str, bytes]:
    """All files of the page, by name: read once, so that no path is ever made of what somebody asks for."""
    found = files(__package__).joinpath("static").iterdir()
    return {one.name: one.read_bytes() for one in found if one.name.rpartition(".")[2] in _KINDS}


async def _to_console() -> Response:
    return RedirectResponse("/console", 307)


async def _icon(request: Request) -> Response:
    return _file(request, "icon.svg")


@pages_router.get("")
async def page(request: Request) -> Response:
    return _file(request, "index.html")


@pages_router.get("/static/{name}")
async def static(request: Request, name: str) -> Response:
    return _file(request, name)


def _file(request: Request, name: str) -> Response:
    content = request.app.state.console_files[name]
    kind = _KINDS[name.rpartition(".")[2]]
    return Response(content, media_type=kind, headers={"Content-Security-Policy": _POLICY})


# ---- who one is ----


@pages_router.post("/login")
async def log_in(request: Request) -> Response:
    """Give a cookie for a token."""
    logins, headers = _logins(request), _headers(request)
    if headers.get(b"content-type", b"").partition(b";")[0].strip() != b"application/json":
        raise BadRequest('send the token as JSON: {"token": "pst_…"}')
    body = await read_secret(request.receive, DEFAULTS.tuning.console)
    try:
        given = msgspec.json.decode(body, type=dict[str, str]).get("token", "").strip()
    except msgspec.MsgspecError:
        raise BadRequest('send the token as JSON: {"token": "pst_…"}') from None
    if not given.isascii() or not given.isprintable():
        raise NotAuthenticated("that is no token: it is pst_… and 43 characters more")
    cookie = await logins.log_in(request.scope, headers, given)
    return JSONResponse({"done": True}, headers={"Set-Cookie": set_cookie(request.scope, cookie)})


@pages_router.post("/logout")
async def log_out(request: Request) -> Response:
    _logins(request).log_out(request.scope, _headers(request))
    return JSONResponse({"done": True}, headers={"Set-Cookie": set_cookie(request.scope, "", ends=True)})


@pages_router.get("/session")
async def session(who: Who, request: Request) -> dict[str, Any]:
    """Who one is, and what one may do to the queue as a whole."""
    found = _logins(request).found(request.scope, _headers(request))
    return {
        "principal": who.principal.name,
        "permissions": [str(one) for one in who.principal.permissions],
        "csrf": "" if found is None else found.csrf,
        "logged_in": found is not None,
        "may": _may(who, None),
    }


@pages_router.get("/data/may")
async def may(who: Who, topic: str) -> dict[str, bool]:
    """By operation, whether one may ask it of a topic: what one may not do is not shown."""
    return _may(who, topic)


def _may(who: Who, topic: str | None) -> dict[str, bool]:
    return {name: allows(who.principal, one.need, topic) for name, one in OPERATIONS.items()}


def _logins(request: Request) -> SessionLogins:
    return cast(SessionLogins, request.app.state.logins)


def _headers(request: Request) -> dict[bytes, bytes]:
    return {name.lower(): value for name, value in request.scope["headers"]}
