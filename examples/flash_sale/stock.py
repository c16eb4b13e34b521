"""The worker behind the gateway: sells what is in stock, each request once.

python -m examples.flash_sale.stock phone 20        # so many are in stock from now on
postroom worker examples.flash_sale.stock:app
"""

from __future__ import annotations

import os
import sqlite3
import sys
from functools import cache

import msgspec

import postroom

app = postroom.App(os.environ.get("POSTROOM_URL", "sqlite:///flash_sale.db"))


class Purchase(msgspec.Struct):
    request_id: str
    item: str
    buyer: str


class Sold(msgspec.Struct):
    request_id: str
    result: str  # "sold" or "sold out"
    left: int


@cache
def database() -> sqlite3.Connection:
    """The shop's own; the queue knows nothing of it. One connection for the whole process."""
    path = os.environ.get("SHOP_DB", "shop.db")
    shop = sqlite3.connect(path, timeout=10, isolation_level=None, check_same_thread=False)
    shop.executescript(
        """PRAGMA journal_mode = WAL;
           CREATE TABLE IF NOT EXISTS stock (item TEXT PRIMARY KEY, left_over INTEGER NOT NULL);
           CREATE TABLE IF NOT EXISTS sales (request_id TEXT PRIMARY KEY, answer BLOB NOT NULL)"""
    )
    return shop


def answer_to(shop: sqlite3.Connection, request_id: str) -> Sold | None:
    row = shop.execute("SELECT answer FROM sales WHERE request_id = ?", (request_id,)).fetchone()
    return msgspec.json.decode(row[0], type=Sold) if row else None


@app.reply("purchases", group="stock", batch=200, concurrency=1)
def sell(purchases: list[Purchase]) -> list[Sold]:
    """Sell to all who wait, up to 200, in one transaction; each gets the answer of the same place.

    A plain function runs in a thread. Asked again, it gives the answer it gave.
    """
    shop = database()
    with shop:
        shop.execute("BEGIN IMMEDIATE")
        return [answer_to(shop, one.request_id) or sell_one(shop, one) for one in purchases]


def sell_one(shop: sqlite3.Connection, purchase: Purchase) -> Sold:
    row = shop.execute("SELECT left_over FROM stock WHERE item = ?", (purchase.item,)).fetchone()
    left = row[0] if row else 0
    sold = Sold(purchase.request_id, "sold" if left else "sold out", max(0, left - 1))
    shop.execute("UPDATE stock SET left_over = ? WHERE item = ?", (sold.left, purchase.item))
    shop.execute("INSERT INTO sales VALUES (?, ?)", (sold.request_id, msgspec.json.encode(sold)))
    return sold


if __name__ == "__main__":
    match sys.argv[1:]:
        case [item, count] if count.isdecimal():
            database().execute("REPLACE INTO stock VALUES (?, ?)", (item, int(count)))
        case _:
            sys.exit("usage: python -m examples.flash_sale.stock ITEM COUNT")
