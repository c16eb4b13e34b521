"""A shop: it shows products from a cache of its own, which the product centre's changes refresh by broadcast.

    uvicorn examples.product_centre.shop:web --port 8001
    SHOP=north uvicorn examples.product_centre.shop:web --port 8002

Start as many as you like: in a group of mode "broadcast" every one of them gets every change. A shop that has
a name keeps its cache in a file, and hears of what changed while it was closed.
"""

from __future__ import annotations

import json
import os
import sqlite3
from contextlib import closing

from fastapi import FastAPI, HTTPException

import postroom

from .centre import URL, Changed, database

SHOP = os.environ.get("SHOP")

app = postroom.App(URL)
web = FastAPI(title="shop", lifespan=app.lifespan)  # the handler runs in the web server's own event loop

FILE = os.environ.get("SHOP_CACHE", f"{SHOP}.cache") if SHOP else ":memory:"
cache = sqlite3.connect(FILE, isolation_level=None)
cache.execute("CREATE TABLE IF NOT EXISTS shown (product TEXT PRIMARY KEY, page TEXT)")


async def forget_all() -> None:
    """Called when this shop may have missed changes: it was away for longer than it is remembered."""
    cache.execute("DELETE FROM shown")


@app.subscribe("products", group="cache", mode="broadcast", start="latest", member=SHOP, on_missed=forget_all)
async def refresh(change: Changed) -> None:
    """Forget what changed: the next one who asks loads it. A repeat does no harm."""
    cache.execute("DELETE FROM shown WHERE product = ?", (change.product,))


@web.get("/products/{product}")
async def show(product: str) -> dict[str, object]:
    row = cache.execute("SELECT page FROM shown WHERE product = ?", (product,)).fetchone()
    return dict(json.loads(row[0])) if row else load(product)


def load(product: str) -> dict[str, object]:
    with closing(database()) as products:
        find = "SELECT title, price, version FROM products WHERE id = ?"
        row = products.execute(find, (product,)).fetchone()
    if row is None:
        raise HTTPException(404, "no such product")
    page = dict(zip(("title", "price", "version"), row, strict=True))
    cache.execute("REPLACE INTO shown VALUES (?, ?)", (product, json.dumps(page)))
    return page
