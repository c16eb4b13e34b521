"""The worker behind the gateway: sells what is in stock, each request once.

postroom worker examples.flash_sale.stock:app
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing

import msgspec

import postroom

app = postroom.App(os.environ.get("POSTROOM_URL", "sqlite:///flash_sale.db"))


class Purchase(msgspec.Struct):
    item: str
    buyer: str


class Sold(msgspec.Struct):
    request_id: str
    result: str  # "sold" or "sold out"
    left: int


def database() -> sqlite3.Connection:
    """The shop's own; the queue knows nothing of it."""
    shop = sqlite3.connect(os.environ.get("SHOP_DB", "shop.db"), timeout=10)
    shop.execute("CREATE TABLE IF NOT EXISTS stock (item TEXT PRIMARY KEY, left_over INTEGER NOT NULL)")
    shop.execute("CREATE TABLE IF NOT EXISTS sales (request_id TEXT PRIMARY KEY, answer BLOB NOT NULL)")
    return shop


def answer_to(shop: sqlite3.Connection, request_id: str) -> Sold | None:
    row = shop.execute("SELECT answer FROM sales WHERE request_id = ?", (request_id,)).fetchone()
    return msgspec.json.decode(row[0], type=Sold) if row else None


@app.reply("purchases", group="stock", concurrency=4)
def sell(purchase: Purchase, message: postroom.Received) -> Sold:
    """A plain function runs in a thread. Asked again, it gives the answer it gave."""
    request_id = message.headers["request-id"].decode()
    with closing(database()) as shop, shop:
        shop.execute("BEGIN IMMEDIATE")
        if (before := answer_to(shop, request_id)) is not None:
            return before
        row = shop.execute("SELECT left_over FROM stock WHERE item = ?", (purchase.item,)).fetchone()
        left = row[0] if row else 0
        sold = Sold(request_id, "sold" if left else "sold out", max(0, left - 1))
        shop.execute("UPDATE stock SET left_over = ? WHERE item = ?", (sold.left, purchase.item))
        shop.execute("INSERT INTO sales VALUES (?, ?)", (request_id, msgspec.json.encode(sold)))
        return sold
