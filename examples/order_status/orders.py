"""Order events that arrive in any order: a state machine takes each one when it fits.

    python -m examples.order_status.orders prepare      # once: the topic, and the shop's tables
    postroom worker examples.order_status.orders:app
    postroom send order-events '{}' --key 42 --header event=created

Payment, parcel service and shop send events of their own, so "shipped" may come before "paid". It is handed
back, and fits later. What comes twice is passed over; what can never fit is a dead letter.
"""

from __future__ import annotations

import os
import sqlite3
import sys

import postroom
from postroom import guards

QUEUE = os.environ.get("POSTROOM_URL", "sqlite:///orders.db")

app = postroom.App(QUEUE)

RULES = {  # each status, and those that lead to it
    "created": None,
    "paid": "created",
    "cancelled": {"created", "paid"},
    "shipped": "paid",
    "delivered": "shipped",
}
PATIENCE = postroom.Backoff("1s", 2, "1h")  # of what comes early: 20 tries of it are nine hours


def database() -> sqlite3.Connection:
    return sqlite3.connect(os.environ.get("SHOP_DB", "shop.db"), timeout=10)


def prepare() -> None:
    """Once: the topic, the shop's tables, and those of the guards."""
    with postroom.sync.connect(QUEUE) as mq:
        mq.create_topic("order-events", exist_ok=True)
    with database() as shop:
        shop.execute("CREATE TABLE IF NOT EXISTS orders (id TEXT PRIMARY KEY, status TEXT NOT NULL)")
        shop.execute("CREATE TABLE IF NOT EXISTS history (number INTEGER PRIMARY KEY, id TEXT, event TEXT)")
        guards.create_tables(shop)


def status_of(shop: sqlite3.Connection, order: str) -> str | None:
    row = shop.execute("SELECT status FROM orders WHERE id = ?", (order,)).fetchone()
    return row[0] if row else None


def set_status(shop: sqlite3.Connection, order: str, status: str) -> None:
    shop.execute("INSERT OR REPLACE INTO orders VALUES (?, ?)", (order, status))


@app.subscribe("order-events", group="status", max_attempts=30)
@guards.transitions(database, rules=RULES, load=status_of, save=set_status, attempts=20, delay=PATIENCE)
def handle(value: bytes, message: postroom.Received, connection: sqlite3.Connection) -> None:
    """Runs in the transaction that moves the order on: both are stored, or neither is."""
    connection.execute(
        "INSERT INTO history (id, event) VALUES (?, ?)",
        (message.key.decode(), message.headers["event"].decode()),
    )


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["prepare"]:
            prepare()
        case _:
            sys.exit("usage: python -m examples.order_status.orders prepare")
