"""A user's program without asyncio. What type checkers must refuse is marked."""

from __future__ import annotations

from dataclasses import dataclass

import postroom.sync
from postroom import Receipt

from .shop import bill


@dataclass
class Order:
    number: int


def main() -> None:
    with postroom.sync.connect("sqlite:///shop.db") as mq:
        mq.create_topic("orders", exist_ok=True)
        receipt: Receipt = mq.send("orders", Order(1), key="1")
        mq.send("orders", b"x", kee="7")  # refused
        wrong: str = mq.send("orders", b"x")  # refused
        mq.sendd("orders", b"x")  # refused
        with mq.consumer("orders", group="billing", mode="orderd") as consumer:  # refused
            for message in consumer:
                value: bytes = message.value
                found: Order = message.decode(Order)
                print(value, found, message.attempt, message.key)
                message.ack()
                message.acks()  # refused
        messages = consumer.poll(max_messages=10, wait="5s")
        print([message.text for message in messages], wrong)
        for read in mq.read("orders", start="earliest"):
            print(read.offset, read.header("source", "web").upper())
        with mq.producer("orders", linger=0.1) as producer:
            later: Receipt = producer.post({"number": 2}, key="2").result()
        print(receipt, later, mq.lag("orders", "billing").total.messages)
        reply = mq.request("quote", Order(3), timeout=2)
        print(reply.json())
    sent: Receipt | None = bill.send_sync(Order(4))  # refused
    print(sent)
