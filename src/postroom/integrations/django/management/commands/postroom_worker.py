"""`manage.py postroom_worker [module:app]`: run the handlers of an app until SIGINT or SIGTERM.

As `postroom worker`, with Django set up and its database connections looked after. Decides nothing else.
"""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from .....client.app.program import load_app
from .....errors import PostroomError
from ...handling import around_handlers

__all__ = ["Command"]


class Command(BaseCommand):  # type: ignore[misc]
    help = "Run the handlers of a Postroom app until SIGINT or SIGTERM; a second one does not wait for them."

    def add_arguments(self, parser: Any) -> None:
        parser.add_argument("app", nargs="?", help="module:app (default: settings.POSTROOM_APP)")

    def handle(self, *args: Any, **options: Any) -> None:
        target = options["app"] or getattr(settings, "POSTROOM_APP", None)
        if not target:
            raise CommandError("Which app? Name it, module:app, or set POSTROOM_APP = 'shop.messages:app'.")
        try:
            app = load_app(target)
            around_handlers(app)
            names = ", ".join(subscription.name for subscription in app.subscriptions)
            self.stdout.write(f"running {names or 'nothing'}", ending="\n")
            self.stdout.flush()
            app.run()
            self.stdout.write("stopped; what was not handled stays in the queue", ending="\n")
        except PostroomError as error:
            raise CommandError(str(error)) from error
