"""The gateway of a flash sale: web requests in front, a queue behind, and an answer within two seconds.

    uvicorn examples.flash_sale.gateway:web

It lets in as many buyers as it may, and tells the others to come back: the shop behind it works at its own
pace. Who gets no answer in time asks for it under the same request id; buying again with it buys nothing.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import Annotated

import msgspec
from fastapi import FastAPI, Header, HTTPException
from pydantic import BaseModel

import postroom

from .stock import answer_to, database

GATEWAY_ID = f"{socket.gethostname()}-{os.getpid()}"
MOST_WAITING = int(os.environ.get("MOST_WAITING", "1000"))
PATIENCE_S = float(os.environ.get("PATIENCE_S", "2"))


class Order(BaseModel):
    item: str
    buyer: str


@asynccontextmanager
async def lifespan(web: FastAPI) -> AsyncIterator[None]:
    async with postroom.connect(os.environ.get("POSTROOM_URL", "sqlite:///flash_sale.db")) as mq:
        await mq.create_topic("purchases", partitions=4, exist_ok=True)
        web.state.mq, web.state.waiting = mq, 0
        yield


web = FastAPI(title="flash sale", lifespan=lifespan)


@web.post("/purchases")
async def buy(order: Order, x_request_id: Annotated[str | None, Header()] = None) -> dict[str, object]:
    request_id = x_request_id or uuid.uuid4().hex
    if web.state.waiting >= MOST_WAITING:
        raise HTTPException(429, "too many buyers at once: try again", {"Retry-After": "1"})
    web.state.waiting += 1
    try:
        reply = await web.state.mq.request(
            "purchases",
            msgspec.json.encode({"item": order.item, "buyer": order.buyer}),
            key=order.item,
            headers={"request-id": request_id, "gateway-id": GATEWAY_ID},
            timeout=PATIENCE_S,
        )
    except postroom.NoReply:
        raise HTTPException(
            504, {"request_id": request_id, "next": f"/purchases/{request_id}"}, {"Retry-After": "2"}
        ) from None
    finally:
        web.state.waiting -= 1
    return dict(msgspec.json.decode(reply.value))


@web.get("/purchases/{request_id}")
def look(request_id: str) -> dict[str, object]:
    """What became of a purchase whose answer did not come in time."""
    with closing(database()) as shop:
        found = answer_to(shop, request_id)
    if found is None:
        raise HTTPException(404, "not sold: no answer is known; buy again under the same request id")
    return msgspec.to_builtins(found)
