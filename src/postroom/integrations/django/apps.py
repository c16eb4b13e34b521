"""The app's place in a Django project. Must never connect: it only registers its checks."""

from __future__ import annotations

from django.apps import AppConfig
from django.core import checks

__all__ = ["PostroomConfig"]


class PostroomConfig(AppConfig):  # type: ignore[misc]
    name = "postroom.integrations.django"
    label = "postroom"
    verbose_name = "Postroom"

    def ready(self) -> None:
        from .checks import check_settings

        checks.register(check_settings)
