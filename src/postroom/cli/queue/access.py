"""`postroom access …`: who may use the served brokers of a queue, and for what (R48).

Works on the queue's database itself, so that nobody can lock themselves out. A token is shown when it is made
and never again: what is stored is its hash. Brokers take up to two seconds to notice a change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...errors import InvalidURL, UnknownPrincipal, UsageError
from ..framework import show
from ..framework.command import Run, command, family
from ..framework.show import View, answer
from ..framework.terminal import Yes, agreed

if TYPE_CHECKING:
    from ...model.access import Principal
    from ...store.contract import Access, Store

__all__ = ["app"]

app = family("access", "Say who may use the served brokers of a queue, and for what.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="The principal.", show_default=False)]
Permissions = Annotated[
    list[str],
    typer.Argument(
        metavar="PERMISSION…",
        help="An action on a pattern of topics: send:orders, consume:orders.*, manage:*.",
        show_default=False,
    ),
]
_SOON = "brokers notice within 2s"


@command(app, "list")
def list_principals(run: Run) -> None:
    """List the principals and what each may do; never their tokens."""
    with _access(run) as access:
        found = access.principals()
    none = "no principals yet: `postroom access add NAME --allow send:orders` makes one"
    _PRINCIPAL.list(run, found, none=none)


@command(app, "add")
def add(
    run: Run,
    name: Name,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            "--allow",
            metavar="PERMISSION",
            help="An action on a pattern of topics: send:orders, consume:orders.*, manage:*. Several times.",
            show_default=False,
        ),
    ] = None,
    no_token: Annotated[
        bool, typer.Option("--no-token", help="It comes with a client certificate of that name.")
    ] = False,
) -> None:
    """Make a principal; its token is shown once."""
    from ...broker.access import new_token
    from ...endpoint.asker import asker
    from ...model.access import Principal, check_principal, hash_of, parse_permissions

    principal = Principal(check_principal(name), parse_permissions(allow or ()))
    token = None if no_token else new_token()
    with _access(run, create=True) as access:
        made = access.add(principal, "" if token is None else hash_of(token), by=asker())
    if not run.json:
        typer.echo(f"created principal {name}; it may {_permissions(made) or 'do nothing yet'}")
    _show_token(run, made, token)


@command(app, "grant")
def grant(run: Run, name: Name, permissions: Permissions) -> None:
    """Let a principal do more."""
    _permit(run, name, permissions, ())


@command(app, "revoke")
def revoke(run: Run, name: Name, permissions: Permissions) -> None:
    """Take permissions from a principal, as they were granted."""
    _permit(run, name, (), permissions)


@command(app, "rotate")
def rotate(run: Run, name: Name) -> None:
    """Make a new token for a principal and show it once; the old one ends."""
    from ...broker.access import new_token
    from ...endpoint.asker import asker
    from ...model.access import hash_of

    token = new_token()
    with _access(run) as access:
        found = _find(access, name)
        access.put(found, hash_of(token), by=asker())
    if not run.json:
        typer.echo(f"principal {name} has a new token; the old one ends ({_SOON})")
    _show_token(run, found, token)


@command(app, "remove")
def remove(run: Run, name: Name, yes: Yes = False) -> None:
    """Remove a principal; its token ends."""
    from ...endpoint.asker import asker

    with _access(run) as access:
        found = _find(access, name)
        counted = f"its token ends, and with it: {_permissions(found) or 'nothing'}"
        facts: dict[str, int | str] = {"principal": name}
        agreed(run, f"remove principal {name!r}", facts, yes=yes, dry_run=False, counted=counted)
        access.remove(name, by=asker())
    answer(run, {"principal": name, "removed": True}, f"removed principal {name} ({_SOON})")


@command(app, "give-query")
def give_query(
    run: Run,
    query: Annotated[
        str, typer.Argument(metavar="QUERY", help="The name under which a job stages.", show_default=False)
    ],
    name: Name,
) -> None:
    """Give what a job stages and publishes to another principal, which goes on with it."""
    from ...config import DEFAULTS
    from ...endpoint.asker import asker
    from ...model.audit import DONE

    with _opened(run) as store:
        _find(store.access, name)
        if not store.staging.give(query, name):
            raise UsageError(f"nobody has staged or decided anything as {query[:120]!r}: look at the name")
        by, asked = asker(), {"query": query}
        id = store.audit.begin(by, "give_query", "", name, asked, None, DEFAULTS.audit_entries)
        store.audit.end(id, DONE, None, None)
    answer(run, {"query": query, "principal": name}, f"query {query} belongs to principal {name}")


def _permit(run: Run, name: str, granted: Sequence[str], revoked: Sequence[str]) -> None:
    from ...endpoint.asker import asker
    from ...model.access import parse_permissions

    more, less = parse_permissions(granted), parse_permissions(revoked)
    with _access(run) as access:
        lacking = [str(one) for one in less if one not in _find(access, name).permissions]
        if lacking:
            have = _permissions(_find(access, name)) or "none"
            raise UsageError(f"principal {name!r} was not granted {', '.join(lacking)}; it has: {have}")
        changed = access.permit(name, more, less, by=asker())
    said = f"principal {name} may {_permissions(changed) or 'do nothing'} ({_SOON})"
    answer(run, _fields(changed), said)


@contextmanager
def _access(run: Run, *, create: bool = False) -> Iterator[Access]:
    with _opened(run, create=create) as store:
        yield store.access


@contextmanager
def _opened(run: Run, *, create: bool = False) -> Iterator[Store]:
    """The queue's first database, where principals are kept."""
    from ...store import open_store

    address = run.address
    if address.kind not in ("sqlite", "postgresql", "mysql"):
        raise InvalidURL(
            "access is changed in the queue's database: name that with --url, such as sqlite:///postroom.db"
        )
    if not create:
        run.refuse_missing(shards=False)
    store = open_store(address)
    try:
        yield store
    finally:
        store.close()


def _find(access: Access, name: str) -> Principal:
    found = access.by_name(name)
    if found is None:
        known = ", ".join(one.name for one in access.principals()) or "none"
        raise UnknownPrincipal(
            f"there is no principal {name!r} (there are: {known}): `postroom access add {name}` makes it",
            principal=name,
        )
    return found


# ---- what is shown ----


def _show_token(run: Run, principal: Principal, token: str | None) -> None:
    if run.json:
        show.json_line({**_fields(principal), "token": token})
    elif token is None:
        typer.echo("it has no token: it comes with a client certificate of that name")
    else:
        typer.echo(f"its token is shown this once:\n\n    {token}\n")


def _permissions(principal: Principal) -> str:
    return " ".join(map(str, principal.permissions))


def _fields(principal: Principal) -> dict[str, Any]:
    return {
        "principal": principal.name,
        "permissions": [str(permission) for permission in principal.permissions],
        "created_at": show.moment(principal.created_at),
    }


_PRINCIPAL: View[Principal] = View(
    fields=_fields,
    columns={
        "principal": lambda principal: principal.name,
        "permissions": _permissions,
        "token": lambda principal: "yes" if principal.secret_hash else "none",
        "made": lambda principal: show.moment(principal.created_at),
    },
)
