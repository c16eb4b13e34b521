"""What an entity has reached, under its lock: one row for each guard, scope and entity.

The row is locked by the statement that makes it sure it is there, before anything is read (I1); whoever comes
at the same time waits until this transaction ends. So what is about one entity is handled one after the
other, also in different processes.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...model.guards import digest_of
from ..databases import Kind, Theirs
from ..message import Received
from .reading import Entity, entity_of, scope_of

__all__ = ["Reached", "locked", "save_state", "save_version"]

_READ = "SELECT version, state, waiting FROM postroom_guards_entities WHERE id = ?"
_INSERT = "INSERT INTO postroom_guards_entities (id, guard, scope, entity) VALUES (?, ?, ?, ?) "
_MAKE: dict[Kind, str] = {
    "sqlite": _INSERT + "ON CONFLICT (id) DO UPDATE SET guard = excluded.guard",
    "postgres": _INSERT + "ON CONFLICT (id) DO UPDATE SET guard = excluded.guard",
    "mysql": _INSERT + "ON DUPLICATE KEY UPDATE guard = VALUES(guard)",
}
_SHOWN = 200


@dataclass(frozen=True, slots=True)
class Reached:
    id: str
    version: int | None
    state: str | None
    waiting: int  # how many messages came early
    shown: str  # the entity, for people


def locked(theirs: Theirs, guard: str, message: Received, entity: Entity, scope: str | None) -> Reached:
    named, what = scope_of(message, scope), entity_of(message, entity)
    id, shown = digest_of(guard, named, what), what.decode(errors="backslashreplace")[:_SHOWN]
    found = theirs.rows(_READ + " FOR UPDATE", (id,)) if theirs.kind == "postgres" else []
    if not found:  # on others a read before the row is there would lock too little, or too much
        theirs.run(_MAKE[theirs.kind], (id, guard, named[:_SHOWN], shown))
        found = theirs.rows(_READ + ("" if theirs.kind == "sqlite" else " FOR UPDATE"), (id,))
    version, state, waiting = found[0]
    return Reached(id, None if version is None else int(version), state, int(waiting), shown)


def save_version(theirs: Theirs, id: str, version: int, waiting: int = 0) -> None:
    theirs.run(
        "UPDATE postroom_guards_entities SET version = ?, waiting = ? WHERE id = ?", (version, waiting, id)
    )


def save_state(theirs: Theirs, id: str, state: str) -> None:
    theirs.run("UPDATE postroom_guards_entities SET state = ? WHERE id = ?", (state, id))
