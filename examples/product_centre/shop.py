"""A shop: it shows products from a cache in memory, which the product centre's changes refresh by broadcast.

    uvicorn examples.product_centre.shop:web --port 8001
    uvicorn examples.product_centre.shop:web --port 8002

Start as many as you like: in a group of mode "broadcast" every one of them gets every change.
"""

from __future__ import annotations

from contextlib import closing

from fastapi import FastAPI, HTTPException

import postroom

from .centre import URL, Changed, database

app = postroom.App(URL)
web = FastAPI(title="shop", lifespan=app.lifespan)  # the handler runs in the web server's own event loop

cache: dict[str, dict[str, object]] = {}


@app.subscribe("products", group="cache", mode="broadcast")
async def refresh(change: Changed) -> None:
    """Forget what changed: the next one who asks loads it. A repeat does no harm.

    This member has no name, so it begins at the end: a cache that starts empty has missed nothing.
    """
    cache.pop(change.product, None)


@web.get("/products/{product}")
async def show(product: str) -> dict[str, object]:
    if product not in cache:
        with closing(database()) as products:
            row = products.execute(
                "SELECT title, price, version FROM products WHERE id = ?", (product,)
            ).fetchone()
        if row is None:
            raise HTTPException(404, "no such product")
        cache[product] = dict(zip(("title", "price", "version"), row, strict=True))
    return cache[product]
