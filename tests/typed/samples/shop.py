"""A user's program on asyncio. What type checkers must refuse is marked."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from typing import Any

import postroom
from postroom import Backoff, Message, Receipt, Received


@dataclass
class Order:
    number: int


app = postroom.App()
outbox = postroom.Outbox()
app.outbox(outbox, "sqlite:///shop.db")


@app.subscribe("orders", group="billing", max_attempts=5, retry=Backoff(1, 2, "10m"))
async def bill(order: Order, message: Received) -> str:
    return f"{order.number} {message.attempt}"


@app.subscribe("orders", group="audit")
async def audit(message: Received) -> None:
    found: Order = message.decode(Order)
    said: str = message.text
    source: str | None = message.header("source")
    print(found, said, source, message.json(), message.sent_at.isoformat())


@app.subscribe("orders", group="reports", batch=100)
def report(orders: list[Order]) -> int:
    return len(orders)


@app.subscribe("work", group="jobs", name="mail")
def mail(letter: dict[str, Any], message: postroom.sync.Received) -> None:
    message.ack()


@app.subscribe("orders", group="lists", concurrency="many")  # refused
async def wrong(order: Order) -> None: ...


@app.every("5m", max_attempts=3)
async def tidy() -> None: ...


async def main() -> None:
    async with postroom.connect("sqlite:///shop.db") as mq:
        receipt: Receipt = await mq.send("orders", Order(1), key="1")
        await mq.send("orders", b"x", kee="7")  # refused
        await mq.send_many("orders", [Order(2), Message(Order(3), key="3")])
        async with mq.producer("orders") as producer:
            later: Receipt = await (await producer.post({"number": 4}))
        print(receipt.offset, later.id)
        letters = await mq.dead_letters("orders", "billing")
        print([letter.traceback for letter in letters], letters[0].reasons)  # refused
    sent: Receipt = await bill.send(Order(5), key="5", delay="1h")
    text: str = await bill(Order(6), message=await anext(mq.read("orders")))
    await bill.send(5)  # refused
    await bill.send(Order(7), dely="1h")  # refused
    await report.send(Order(8))
    await report.send([Order(8)])  # refused
    await mail.send({"to": "ann"})
    await mail.send(Order(9))  # refused
    await audit.send(Order(10))
    print(sent, text, postroom.__version__)


def order(db: sqlite3.Connection, number: int) -> None:
    with outbox.transaction(db):
        bill.send(Order(number), connection=db, key="1")
        bill.send(number, connection=db)  # refused
