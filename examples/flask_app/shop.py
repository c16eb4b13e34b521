"""A shop on Flask: a request sends, and a worker beside the web server handles.

flask --app examples.flask_app.shop run
postroom worker examples.flask_app.shop:messages
"""

from __future__ import annotations

import json
import os
import sqlite3
from contextlib import closing
from dataclasses import asdict, dataclass

import flask

import postroom
from postroom.integrations.flask import Postroom

app = flask.Flask(__name__)
app.config["POSTROOM_URL"] = os.environ.get("POSTROOM_URL", "sqlite:///shop_queue.db")
app.config["SHOP_DB"] = os.environ.get("SHOP_DB", "shop.db")
queue = Postroom(app)


@dataclass
class Order:
    number: str
    total: int


def database() -> sqlite3.Connection:
    shop = sqlite3.connect(flask.current_app.config["SHOP_DB"], timeout=10)
    shop.execute("CREATE TABLE IF NOT EXISTS bills (number TEXT PRIMARY KEY, total INTEGER)")
    return shop


@app.cli.command("prepare")
def prepare() -> None:
    """flask --app examples.flask_app.shop prepare"""
    queue.mq.create_topic("orders", partitions=2, exist_ok=True)
    queue.close()


@app.post("/orders/<number>")
def order(number: str) -> tuple[dict[str, str], int]:
    total = flask.request.form.get("total", type=int)
    if total is None:
        return {"error": "name the total, a number of cents: total=990"}, 400
    placed = Order(number, total)
    queue.mq.send("orders", json.dumps(asdict(placed)).encode(), key=number)  # stored when it returns
    return {"number": number, "bill": f"/orders/{number}/bill"}, 202


@app.get("/orders/<number>/bill")
def bill(number: str) -> tuple[dict[str, object], int]:
    with closing(database()) as shop:
        row = shop.execute("SELECT total FROM bills WHERE number = ?", (number,)).fetchone()
    return ({"number": number, "total": row[0]}, 200) if row else ({"number": number}, 404)


# ---- in the worker ----

messages = postroom.App(app.config["POSTROOM_URL"])
messages.middleware(queue.context)  # handlers have `flask.current_app`


@messages.subscribe("orders", group="billing")
def write_bill(order: Order) -> None:
    """A repeat writes the same row."""
    with closing(database()) as shop, shop:
        shop.execute("INSERT OR IGNORE INTO bills VALUES (?, ?)", (order.number, order.total))
