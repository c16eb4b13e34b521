"""Django: the queue of a project, handlers that use its models, and a command that runs them.

    INSTALLED_APPS = [..., "postroom.integrations.django"]
    POSTROOM_URL = "postgresql://…"      # and POSTROOM_OPTIONS, a dict with options of `postroom.connect`
    POSTROOM_APP = "shop.messages:app"   # what `manage.py postroom_worker` runs

    from postroom.integrations.django import App, queue

    queue().send("orders", b"…")         # in a view
    app = App()                          # in shop/messages.py: a postroom.App at POSTROOM_URL
    path("health", health_view)          # in urls.py: 200 if every handler of POSTROOM_APP runs in a worker

Decides when database connections are closed: around each handler, as around each request. Must never open a
connection to the queue before it is used, since servers fork, nor read settings when it is imported.
"""

from __future__ import annotations

from .apps import PostroomConfig
from .handling import App, around_handlers
from .using import health, health_view, queue

__all__ = ["App", "PostroomConfig", "around_handlers", "health", "health_view", "queue"]
