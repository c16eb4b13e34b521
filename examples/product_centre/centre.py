"""The product centre: it owns the products, and announces every change to whoever wants to know.

    uvicorn examples.product_centre.centre:web
    postroom worker examples.product_centre.centre:app

It knows none of its readers. Each is a group of its own and gets every change, at its own pace.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing

import msgspec
from fastapi import FastAPI
from pydantic import BaseModel

import postroom
from postroom.integrations.fastapi import Queue

URL = os.environ.get("POSTROOM_URL", "sqlite:///products_queue.db")


class Changed(msgspec.Struct):
    """What is announced: which product, and its version. Who needs more looks it up."""

    product: str
    version: int


class Product(BaseModel):
    title: str
    price: int


def database() -> sqlite3.Connection:
    products = sqlite3.connect(os.environ.get("PRODUCTS_DB", "products.db"), timeout=10)
    products.executescript(
        """CREATE TABLE IF NOT EXISTS products (id TEXT PRIMARY KEY, title TEXT, price INT, version INT);
           CREATE TABLE IF NOT EXISTS found_by (word TEXT, id TEXT, PRIMARY KEY (word, id));
           CREATE TABLE IF NOT EXISTS alerts (id TEXT, price INTEGER, version INTEGER PRIMARY KEY)"""
    )
    return products


# ---- the centre ----


@asynccontextmanager
async def lifespan(web: FastAPI) -> AsyncIterator[dict[str, object]]:
    async with postroom.connect(URL) as mq:
        await mq.create_topic("products", partitions=4, exist_ok=True)
        yield {"postroom": mq}


web = FastAPI(title="product centre", lifespan=lifespan)


@web.put("/products/{product}")
async def change(product: str, new: Product, mq: Queue) -> dict[str, object]:
    with closing(database()) as products, products:
        products.execute("BEGIN IMMEDIATE")
        version = products.execute("SELECT COALESCE(MAX(version), 0) + 1 FROM products").fetchone()[0]
        row = (product, new.title, new.price, version)
        products.execute("REPLACE INTO products VALUES (?, ?, ?, ?)", row)
    # The key keeps the changes of one product in order. A crash right here would leave this change
    # unannounced: where that matters, send through an outbox.
    await mq.send("products", msgspec.json.encode(Changed(product, version)), key=product)
    return {"product": product, "version": version}


# ---- two of its readers; they may as well be other programs ----

app = postroom.App(URL)


@app.subscribe("products", group="search", mode="ordered", concurrency=4)
def index(change: Changed) -> None:
    """Ordered: each product's changes in turn, so that an older title never replaces a newer one."""
    with closing(database()) as products, products:
        (title,) = products.execute("SELECT title FROM products WHERE id = ?", (change.product,)).fetchone()
        products.execute("DELETE FROM found_by WHERE id = ?", (change.product,))
        words = {(word.lower(), change.product) for word in title.split()}
        products.executemany("INSERT INTO found_by VALUES (?, ?)", words)


@app.subscribe("products", group="alerts")
def alert(change: Changed) -> None:
    """Shared: order does not matter here. Of a version that is no longer there a later change tells.

    The version is the key of the row: a repeat adds nothing.
    """
    with closing(database()) as products, products:
        products.execute(
            """INSERT OR IGNORE INTO alerts
               SELECT id, price, version FROM products WHERE id = ? AND version = ? AND price < 10""",
            (change.product, change.version),
        )
