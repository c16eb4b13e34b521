"""`newest`: of what is about one entity, only a larger version than the last is handled (R33)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...model.guards import is_newer
from ..databases import Theirs
from ..message import Received
from .entities import locked, save_version
from .reading import Entity, Version, version_of

__all__ = ["Newest"]


class Newest:
    def __init__(self, version: Version, entity: Entity, scope: str | None) -> None:
        self._version, self._entity, self._scope = version, entity, scope

    def ready(self, theirs: Theirs, connection: Any, message: Received) -> Sequence[Received]:
        version = version_of(message, self._version)
        reached = locked(theirs, "newest", message, self._entity, self._scope)
        if not is_newer(reached.version, version):
            return []
        save_version(theirs, reached.id, version)
        return [message]

    def shown(self, ready: Sequence[Any]) -> bool:
        return bool(ready)
