"""Principals: who may use served brokers, and for what (R48).

Of a principal's secret only its hash is here; the queue's own key is kept as it is (`model.identity`). Few
rows, read by their key or all of them. Every change is flushed: a principal that was removed must not come
back after a crash.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Sequence

from ...errors import PrincipalExists, UnknownPrincipal
from ...model.access import KEY_BYTES, Permission, Principal, parse_permissions
from ...model.audit import DONE, Asker
from .catalog.audit import note
from .session import Area, Row, Session, Transaction, verbs

__all__ = ["SqlAccess"]

_SELECT = "SELECT name, permissions, created_at, secret_hash FROM postroom_principals"
_INSERT = "INSERT INTO postroom_principals (name, secret_hash, permissions, created_at) VALUES (?, ?, ?, ?)"
_PERMIT = "UPDATE postroom_principals SET permissions = ? WHERE name = ?"
_CHANGE = "UPDATE postroom_principals SET permissions = ?, secret_hash = ? WHERE name = ?"
_SETTING = "SELECT value FROM postroom_settings WHERE name = ?"
_KEY = "identity_key"


@verbs
class SqlAccess:
    def __init__(self, session: Session) -> None:
        self._session = session

    def add(self, principal: Principal, secret_hash: str, *, by: Asker | None = None) -> Principal:
        name = principal.name
        with self._session.write(Area.LOG) as tx:
            if tx.one(f"{_SELECT} WHERE name = ?", name) is not None:
                raise PrincipalExists(
                    f"there is a principal {name!r} already: `postroom access grant {name} …` adds "
                    f"permissions, `postroom access rotate {name}` makes a new token",
                    principal=name,
                )
            now = tx.now_ms()
            tx.do(_INSERT, name, secret_hash, _text(principal.permissions), now)
            _note(tx, by, "add_principal", name, None, principal.permissions)
        return Principal(name, principal.permissions, now, secret_hash)

    def put(self, principal: Principal, secret_hash: str | None, *, by: Asker | None = None) -> None:
        name, permissions = principal.name, _text(principal.permissions)
        with self._session.write(Area.LOG) as tx:
            row = tx.locked(f"{_SELECT} WHERE name = ?", name)
            if row is not None:
                tx.do(_CHANGE, permissions, row[3] if secret_hash is None else secret_hash, name)
            elif secret_hash is None:
                raise _unknown(name)
            else:
                tx.do(_INSERT, name, secret_hash, permissions, tx.now_ms())
            before = None if row is None else _principal(row).permissions
            action = "change_permissions" if secret_hash is None else "rotate_token"
            _note(tx, by, action, name, before, principal.permissions)

    def permit(
        self,
        name: str,
        grant: Sequence[Permission],
        revoke: Sequence[Permission],
        *,
        by: Asker | None = None,
    ) -> Principal:
        with self._session.write(Area.LOG) as tx:
            row = tx.locked(f"{_SELECT} WHERE name = ?", name)
            if row is None:
                raise _unknown(name)
            before = _principal(row)
            kept = dict.fromkeys((*before.permissions, *grant))
            permissions = tuple(permission for permission in kept if permission not in revoke)
            tx.do(_PERMIT, _text(permissions), name)
            if permissions != before.permissions:
                _note(tx, by, "change_permissions", name, before.permissions, permissions)
        return Principal(name, permissions, before.created_at, before.secret_hash)

    def remove(self, name: str, *, by: Asker | None = None) -> bool:
        with self._session.write(Area.LOG) as tx:
            row = tx.locked(f"{_SELECT} WHERE name = ?", name)
            if row is None:
                return False
            tx.do("DELETE FROM postroom_principals WHERE name = ?", name)
            _note(tx, by, "remove_principal", name, _principal(row).permissions, None)
        return True

    def by_secret(self, secret_hash: str) -> Principal | None:
        if not secret_hash:  # that of principals without a secret
            return None
        with self._session.read(Area.LOG) as tx:
            row = tx.one(f"{_SELECT} WHERE secret_hash = ?", secret_hash)
        if row is None or not hmac.compare_digest(str(row[3]), secret_hash):
            return None
        return _principal(row)

    def by_name(self, name: str) -> Principal | None:
        with self._session.read(Area.LOG) as tx:
            row = tx.one(f"{_SELECT} WHERE name = ?", name)
        return None if row is None else _principal(row)

    def principals(self) -> list[Principal]:
        with self._session.read(Area.LOG) as tx:
            rows = tx.all(_SELECT)
        return sorted(map(_principal, rows), key=lambda principal: principal.name)

    def key(self) -> bytes:
        with self._session.read(Area.LOG) as tx:
            row = tx.one(_SETTING, _KEY)
        return self._make_key() if row is None else bytes.fromhex(row[0])

    def _make_key(self) -> bytes:
        with self._session.write(Area.LOG) as tx:
            tx.locked(_SETTING, "catalog_version")  # of two who make it at once, one does (I1)
            row = tx.one(_SETTING, _KEY)
            if row is not None:
                return bytes.fromhex(row[0])
            key = secrets.token_bytes(KEY_BYTES)
            tx.do("INSERT INTO postroom_settings (name, value) VALUES (?, ?)", _KEY, key.hex())
        return key


def _note(
    tx: Transaction,
    by: Asker | None,
    action: str,
    name: str,
    before: Sequence[Permission] | None,
    after: Sequence[Permission] | None,
) -> None:
    """Write the change into the audit log, in its own transaction, if somebody is to be named for it."""
    if by is not None:
        was, became = (None if some is None else {"permissions": _text(some)} for some in (before, after))
        note(tx, by, action, "", name, DONE, {}, was, became)


def _principal(row: Row) -> Principal:
    name, permissions, created_at, secret_hash = row
    return Principal(name, parse_permissions(permissions.split()), created_at, secret_hash)


def _text(permissions: Sequence[Permission]) -> str:
    return " ".join(map(str, permissions))


def _unknown(name: str) -> UnknownPrincipal:
    return UnknownPrincipal(
        f"there is no principal {name!r}: `postroom access list` shows all, `postroom access add {name}` "
        "makes one",
        principal=name,
    )
