"""Django: the queue of a project, handlers that use its models, and a command that runs them.

    INSTALLED_APPS = [..., "penstock.integrations.django"]
    PENSTOCK_URL = "postgresql://…"      # and PENSTOCK_OPTIONS, a dict with options of `penstock.connect`
    PENSTOCK_APP = "shop.messages:app"   # what `manage.py penstock_worker` runs

    from penstock.integrations.django import App, queue

    queue().send("orders", b"…")         # in a view
    app = App()                          # in shop/messages.py: a penstock.App at PENSTOCK_URL

Decides when database connections are closed: around each handler, as around each request. Must never open a
connection to the queue before it is used, since servers fork, nor read settings when it is imported.
"""

from __future__ import annotations

from .apps import PenstockConfig
from .handling import App, around_handlers
from .using import queue

__all__ = ["App", "PenstockConfig", "around_handlers", "queue"]
