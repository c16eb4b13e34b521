"""Errors as HTTP tells them: one shape, and for every error of the tree a status.

    {"error": {"code": "unknown_topic", "message": "…", "retriable": false, "details": {…}}}

`STATUS` is the only place that knows statuses. A fault of the broker (5xx that is not about the store being
away or full) is logged with a reference, and the client is told the reference and nothing else.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from typing import Any

from fastapi.encoders import jsonable_encoder
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from .. import errors
from ..errors import PostroomError

__all__ = ["STATUS", "BadRequest", "failure", "plain_failure", "status_of"]

_log = logging.getLogger("postroom.http")

STATUS: dict[type[PostroomError], int] = {
    errors.PostroomError: 500,
    errors.UsageError: 400,
    errors.MessageTooLarge: 413,
    errors.ClosedError: 503,  # it is stopping
    errors.ForkError: 500,
    errors.CatalogError: 404,
    errors.TopicExists: 409,
    errors.TopicConflict: 409,
    errors.GroupExists: 409,
    errors.GroupConflict: 409,
    errors.PrincipalExists: 409,
    errors.RouteConflict: 409,
    errors.StagingConflict: 409,
    errors.GroupLive: 409,
    errors.ShardUnknown: 409,
    errors.LimitReached: 429,
    errors.AppendError: 409,
    errors.CorruptBatch: 400,
    errors.BacklogFull: 429,
    errors.UnknownFate: 504,
    errors.DeliveryError: 409,
    errors.AccessError: 403,
    errors.NotAuthenticated: 401,
    errors.ProtocolError: 400,
    errors.StoreError: 500,
    errors.StoreUnavailable: 503,
    errors.StoreBusy: 503,
    errors.StoreFull: 507,
}
"""An error that is not here has the status of the nearest one above it in the tree."""

_RETRY_AFTER_S = {429: 1, 503: 2, 507: 30}
_CODES = {404: "not_found", 405: "method_not_allowed", 413: "too_large", 504: "timeout", 408: "timeout"}
_HIDDEN = "the broker failed; its log has the reason under {}"


class BadRequest(errors.UsageError):
    """The request cannot be understood, or is not what is taken here."""

    code = "invalid_request"


def status_of(error: PostroomError) -> int:
    if isinstance(error, errors.SendTimeout) and error.details.get("stored") is False:
        return 429 if error.details.get("reason") == "rate_limit" else 503
    return next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)


def failure(error: Exception) -> JSONResponse:
    """The response for an error of any kind."""
    if isinstance(error, PostroomError):
        status = status_of(error)
        if status == 500:
            return _hidden(error, error.code)
        details = {name: value for name, value in error.details.items() if not name.startswith("_")}
        retriable = error.retriable or error.details.get("stored") is False
        sentence = error.details.get("_served") or str(error)
        return plain_failure(status, error.code, sentence, retriable=retriable, details=details)
    if isinstance(error, RequestValidationError):
        wrong = [{"where": list(map(str, one["loc"])), "message": one["msg"]} for one in error.errors()]
        first = f"{'.'.join(wrong[0]['where'])}: {wrong[0]['message']}" if wrong else "it is not valid"
        sentence = f"invalid request: {first}; see /docs"
        return plain_failure(400, BadRequest.code, sentence, details={"errors": wrong[:20]})
    if isinstance(error, HTTPException):
        code = _CODES.get(error.status_code, "http")
        return plain_failure(error.status_code, code, f"{error.detail}: /docs lists what there is")
    return _hidden(error, "unexpected")


def plain_failure(
    status: int, code: str, message: str, *, retriable: bool = False, details: Mapping[str, Any] | None = None
) -> JSONResponse:
    headers: dict[str, str] = {}
    if status == 401:
        headers["WWW-Authenticate"] = 'Bearer realm="postroom"'
    if retriable and status in _RETRY_AFTER_S:
        headers["Retry-After"] = str(_RETRY_AFTER_S[status])
    if status in (401, 408, 413):
        headers["Connection"] = "close"  # the rest of its body is not read
    body = {"code": code, "message": message, "retriable": retriable, "details": _plain(details or {})}
    return JSONResponse({"error": body}, status, headers)


def _hidden(error: Exception, code: str) -> JSONResponse:
    reference = secrets.token_hex(4)
    _log.error("a request over HTTP failed (%s): %r", reference, error, exc_info=error)
    return plain_failure(500, code, _HIDDEN.format(reference), details={"reference": reference})


def _plain(details: Mapping[str, Any]) -> Any:
    return jsonable_encoder(details, custom_encoder={bytes: lambda value: value.decode(errors="replace")})
