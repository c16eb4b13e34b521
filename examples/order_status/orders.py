"""Order events that arrive in any order: a state machine takes each one when it fits.

    postroom worker examples.order_status.orders:app
    postroom send order-events '{}' --key 42 --header event=created

Payment, parcel service and shop send events of their own, so "shipped" may come before "paid". It is handed
back, and fits a little later; what never fits is a dead letter after five tries.
"""

from __future__ import annotations

import os
import sqlite3

import postroom
from postroom import guards

app = postroom.App(os.environ.get("POSTROOM_URL", "sqlite:///orders.db"))

RULES = {  # each status, and those that lead to it
    "created": None,
    "paid": "created",
    "cancelled": {"created", "paid"},
    "shipped": "paid",
    "delivered": "shipped",
}


def database() -> sqlite3.Connection:
    return sqlite3.connect(os.environ.get("SHOP_DB", "shop.db"), timeout=10)


def prepare() -> None:
    """Once: the shop's table, and those of the guards."""
    with database() as shop:
        shop.execute("CREATE TABLE IF NOT EXISTS orders (id TEXT PRIMARY KEY, status TEXT NOT NULL)")
        shop.execute("CREATE TABLE IF NOT EXISTS history (number INTEGER PRIMARY KEY, id TEXT, event TEXT)")
        guards.create_tables(shop)


def status_of(shop: sqlite3.Connection, order: str) -> str | None:
    row = shop.execute("SELECT status FROM orders WHERE id = ?", (order,)).fetchone()
    return row[0] if row else None


def set_status(shop: sqlite3.Connection, order: str, status: str) -> None:
    shop.execute("INSERT OR REPLACE INTO orders VALUES (?, ?)", (order, status))


@app.subscribe("order-events", group="status")
@guards.transitions(database, rules=RULES, load=status_of, save=set_status, delay="1s")
def handle(value: bytes, message: postroom.Received, connection: sqlite3.Connection) -> None:
    """Runs in the transaction that moves the order on: both are stored, or neither is."""
    connection.execute(
        "INSERT INTO history (id, event) VALUES (?, ?)",
        (message.key.decode(), message.headers["event"].decode()),
    )
