"""Sending over HTTP: a list of messages as JSON, or one message as the body itself.

202 comes once the messages are stored, with a receipt for each; if one is wrong, none is sent. They go
through the principal's connection, so concurrent requests share batches. `Content-Type: application/json`
means a list; with any other the body is the value of one message, and headers that begin with `X-Postroom-`
say the rest.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import ValidationError

from ...client.message import Message, Receipt
from ..encoding import from_base64
from ..failures import BadRequest
from ..models import Send, SendMessage, Sent, SentReceipt
from ..service import Who

__all__ = ["SCHEMAS", "router"]

router = APIRouter(tags=["messages"])

_SEND_S = 10.0
_LONGEST_S = 60.0
_OWN = {"key": "x-postroom-key", "id": "x-postroom-id", "source": "x-postroom-source",
        "delay": "x-postroom-delay", "at": "x-postroom-at", "expires": "x-postroom-expires"}  # fmt: skip
_HEADER = "x-postroom-header-"
_LARGE = 128 * 1024
_SCHEMA = Send.model_json_schema(ref_template="#/components/schemas/{model}")
SCHEMAS: dict[str, Any] = _SCHEMA.pop("$defs")
"""What the page about the API needs besides what FastAPI finds by itself."""

_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": _SCHEMA},
            "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
        },
    }
}


@router.post("/topics/{topic}/messages", status_code=202, openapi_extra=_BODY)
async def send(
    who: Who,
    topic: str,
    request: Request,
    timeout: Annotated[float, Query(gt=0, le=_LONGEST_S)] = _SEND_S,
) -> Sent:
    """Send messages, and wait until they are stored."""
    who.broker.permit("append", topic)
    body = await request.body()
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        messages = [_single(body, request.headers)]
    elif len(body) > _LARGE:  # reading it takes long, and others wait for the loop
        messages = await asyncio.to_thread(_listed, body)
    else:
        messages = _listed(body)
    receipts = await who.mq.send_many(topic, messages, timeout=timeout)
    return Sent(list(map(_receipt, receipts)))


def _listed(body: bytes) -> list[Message]:
    try:
        wish = Send.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise BadRequest(
            f'{where}: {first["msg"]}; a list of messages is written {{"messages": [{{"value": "paid"}}]}}, '
            "and one message as it is takes another Content-Type"
        ) from None
    return [_message(at, one) for at, one in enumerate(wish.messages)]


def _message(at: int, one: SendMessage) -> Message:
    if (one.value is None) == (one.value_b64 is None):
        raise BadRequest(f"messages.{at}: give it a value, or value_b64; one of them", index=at)
    if one.value_b64 is not None:
        value = from_base64(one.value_b64, f"messages.{at}.value_b64")
    elif isinstance(one.value, str):
        value = one.value.encode(errors="surrogatepass")
    else:
        value = _json(at, one.value.content)  # type: ignore[union-attr]
    named = one.model_dump(include={"key", "headers", "id", "source", "delay", "at", "expires"})
    return Message(value, **named)


def _json(at: int, content: Any) -> bytes:
    try:
        return json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    except ValueError:
        raise BadRequest(
            f"messages.{at}.value: NaN and Infinity are no JSON; write null, or a text", index=at
        ) from None


def _single(body: bytes, headers: Mapping[str, str]) -> Message:
    named: dict[str, Any] = {name: headers[header] for name, header in _OWN.items() if header in headers}
    own = {name[len(_HEADER) :]: value for name, value in headers.items() if name.startswith(_HEADER)}
    return Message(body, headers=own or None, **named)


def _receipt(receipt: Receipt) -> SentReceipt:
    due = None if receipt.due is None else receipt.due.isoformat()
    return SentReceipt(receipt.partition, receipt.offset, receipt.id, receipt.duplicate, due)
