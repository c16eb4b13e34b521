"""The gateway of a flash sale: web requests in front, a queue behind, and an answer within two seconds.

    uvicorn examples.flash_sale.gateway:web

It lets in as many buyers as can still be answered in time, and tells the others at once to come back. Who
gets no answer in time asks for it under the same request id; buying again with it buys nothing.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

import msgspec
from fastapi import FastAPI, Header, HTTPException
from pydantic import BaseModel

import postroom

from .stock import Purchase, answer_to, database

GATEWAY_ID = f"{socket.gethostname()}-{os.getpid()}"
PATIENCE_S = float(os.environ.get("PATIENCE_S", "2"))


class Line:
    """Who waits for an answer: no more than get one in half of the patience. The other half is for surprises.

    An answer that comes soon while the line is long makes room for one more. One that comes late shows how
    many would have been answered soon: the line gets shorter. When an answer does not come at all, one buyer
    at a time is let in until one is answered.
    """

    soon_s, least = PATIENCE_S / 2, 20

    def __init__(self) -> None:
        self.waiting, self.room, self.silent = 0, 200.0, False

    @property
    def has_room(self) -> bool:
        return self.waiting < (1 if self.silent else self.room)

    def answered(self, ahead: int, seconds: float) -> None:
        self.silent = False
        if seconds > self.soon_s:
            self.room += (max(self.least, ahead * self.soon_s / seconds) - self.room) / 20
        elif max(ahead, self.waiting) > self.room / 2:
            self.room += 1


class Order(BaseModel):
    item: str
    buyer: str


@asynccontextmanager
async def lifespan(web: FastAPI) -> AsyncIterator[None]:
    async with postroom.connect(os.environ.get("POSTROOM_URL", "sqlite:///flash_sale.db")) as mq:
        # Volatile: who waits for two seconds needs no flush to disk. What was sold is in the shop's database.
        await mq.create_topic("purchases", partitions=4, storage="volatile", exist_ok=True)
        web.state.mq = mq
        yield


web = FastAPI(title="flash sale", lifespan=lifespan)
line = Line()


@web.post("/purchases")
async def buy(order: Order, x_request_id: Annotated[str | None, Header()] = None) -> dict[str, object]:
    request_id = x_request_id or uuid.uuid4().hex
    if not line.has_room:
        raise HTTPException(503, "too many buyers at once: try again", {"Retry-After": "1"})
    line.waiting += 1
    ahead, began = line.waiting, time.monotonic()
    try:
        reply = await web.state.mq.request(
            "purchases",
            msgspec.json.encode(Purchase(request_id, order.item, order.buyer)),
            headers={"gateway-id": GATEWAY_ID},
            timeout=PATIENCE_S,
        )
        line.answered(ahead, time.monotonic() - began)
    except postroom.RequestFailed:  # the worker's log says why
        raise HTTPException(503, "the shop is in trouble: try again", {"Retry-After": "1"}) from None
    except postroom.NoReply:
        line.silent = True
        raise HTTPException(
            504, {"request_id": request_id, "next": f"/purchases/{request_id}"}, {"Retry-After": "1"}
        ) from None
    finally:
        line.waiting -= 1
    return dict(msgspec.json.decode(reply.value))


@web.get("/purchases/{request_id}")
def look(request_id: str) -> dict[str, object]:
    """What became of a purchase whose answer did not come in time."""
    found = answer_to(database(), request_id)
    if found is None:
        raise HTTPException(404, "not sold: no answer is known; buy again under the same request id")
    return msgspec.to_builtins(found)
