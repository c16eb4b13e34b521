"""The app of a Django project, and what `manage.py check` says about its settings.

Must never connect: in a build the queue may be away.
"""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig
from django.conf import settings
from django.core import checks
from django.core.checks import Error, Warning

from ...address import parse
from ...errors import PostroomError

__all__ = ["PostroomConfig", "check_settings"]


class PostroomConfig(AppConfig):  # type: ignore[misc]
    name = "postroom.integrations.django"
    label = "postroom"
    verbose_name = "Postroom"

    def ready(self) -> None:
        checks.register(check_settings)


def check_settings(app_configs: Any, **kwargs: Any) -> list[Any]:
    return [*_url(getattr(settings, "POSTROOM_URL", None)), *_app(getattr(settings, "POSTROOM_APP", None))]


def _url(url: Any) -> list[Any]:
    if not url:
        hint = "Set it, such as POSTROOM_URL = 'sqlite:////var/lib/shop/queue.db'."
        return [Error("POSTROOM_URL is not set.", hint=hint, id="postroom.E001")]
    try:
        address = parse(url)
    except PostroomError as error:
        return [Error(f"POSTROOM_URL is no address of a queue: {error}", id="postroom.E002")]
    if address.kind == "memory":
        hint = "Fine for tests. Otherwise the worker and the web server each have a queue of their own."
        return [Warning("POSTROOM_URL is in memory.", hint=hint, id="postroom.W001")]
    return []


def _app(target: Any) -> list[Any]:
    module, colon, name = str(target or "").partition(":")
    if target is None or (module and colon and name):
        return []
    hint = "Write module:app, such as 'shop.messages:app'."
    return [Error(f"POSTROOM_APP = {target!r} names no app.", hint=hint, id="postroom.E003")]
