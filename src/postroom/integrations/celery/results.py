"""Results: Postroom keeps none. Whoever asks for it as Celery's result backend is told what to use.

Celery finds the class by the entry point `postroom` of the group `celery.result_backends`. Must never be
made: it would have to forget every result.
"""

from __future__ import annotations

from typing import Any, NoReturn

from celery.exceptions import ImproperlyConfigured

__all__ = ["NoResults"]


class NoResults:
    def __new__(cls, *args: Any, **how: Any) -> NoReturn:
        raise ImproperlyConfigured(
            "Postroom is a message queue and keeps no results: set result_backend to 'rpc://' (results go to "
            "whoever sent the task, through Postroom), to a database such as 'db+postgresql://…' or "
            "'db+sqlite:///results.db', or to nothing if no one reads them"
        )
