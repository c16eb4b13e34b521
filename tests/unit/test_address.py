"""Addresses: what is understood, and what a mistyped one is answered with."""

from __future__ import annotations

from pathlib import Path

import pytest

from postroom import InvalidURL, connect
from postroom.address import Address, parse


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("sqlite:///orders.db", Address("sqlite", path=Path("orders.db"))),
        ("sqlite:///data/orders.db", Address("sqlite", path=Path("data/orders.db"))),
        ("sqlite:////var/orders.db", Address("sqlite", path=Path("/var/orders.db"))),
        ("sqlite:///C:/data/orders.db", Address("sqlite", path=Path("C:/data/orders.db"))),
        ("sqlite:///~/orders.db", Address("sqlite", path=Path.home() / "orders.db")),
        ("memory://", Address()),
        ("memory://tests", Address(name="tests")),
    ],
)
def test_addresses(url: str, address: Address) -> None:
    assert parse(url) == address


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("sqlite://orders.db", "did you mean sqlite:///orders.db?"),
        ("sqlite:orders.db", "did you mean sqlite:///orders.db?"),
        ("sqlite:/var/orders.db", "did you mean sqlite:////var/orders.db?"),
        ("sqlite://", "names no file"),
        ("sqlite:///", "names no file"),
        ("sqlite:////", "names no file"),
        ("sqlite:///:memory:", "memory://"),
        ("sqlite://:memory:", "memory://"),
        ("sqlite:///orders/", "names a directory"),
        ("sqlite:///orders.db?mode=ro", "give them to connect()"),
        ("sqllite:///orders.db", "did you mean sqlite:///orders.db?"),
        ("SQLITE:///orders.db", "did you mean sqlite:///orders.db?"),
        ("sqlite3:///orders.db", "did you mean sqlite:///orders.db?"),
        ("memry://", "did you mean memory://?"),
        ("memory:", "did you mean memory://?"),
        ("memory:///tests", "did you mean memory://tests?"),
        ("memory://a b", "letters, digits"),
        ("postroom:localhost:7070", "use postroom://host:7070"),
        ("postroom://", "use postroom://host:7070"),
        ("postroom://a:70700", "use postroom://host:7070"),
        ("postroom://a:7070;b:7070", "use postroom://host:7070"),
        ("postroom://secret@a:7070", "a token is not a part of the address"),
        ("postgresq://localhost/db", "did you mean postgresql://localhost/db?"),
        ("postgresql://", "names no server"),
        ("postgresql://localhost", "names no database: add it, such as postgresql://localhost/orders"),
        ("postgresql://localhost/", "names no database"),
        ("postgresql://localhost/a/b", "names no database"),
        ("postgresql://localhost:port/db", "cannot be read"),
        ("postgresql://me:p#w@localhost/db", "cannot be read"),
        ("postgresql://localhost/db?pgbouncer=maybe", "neither 1 nor 0"),
        ("mysql://localhost", "names no database"),
        ("mysql://localhost/db?charset=latin1", "unknown option 'charset'"),
        ("redis://localhost", "no scheme 'redis'"),
        ("orders.db", "use sqlite:///orders.db"),
        ("", "sqlite:///orders.db"),
        ("C:\\data\\orders.db", "no scheme"),
    ],
)
def test_mistakes_are_answered_with_the_right_spelling(url: str, says: str) -> None:
    with pytest.raises(InvalidURL) as caught:
        parse(url)
    assert says in str(caught.value)


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg"])
def test_postgresql(scheme: str) -> None:
    address = parse(f"{scheme}://me:s%40cret@db.example:5433/orders?sslmode=require&pgbouncer=1")
    assert (address.kind, address.pgbouncer) == ("postgresql", True)
    assert address.dsn == "postgresql://me:s%40cret@db.example:5433/orders?sslmode=require"
    assert address.shown == f"{scheme}://me@db.example:5433/orders"
    assert parse(f"{scheme}://[::1]/orders").shown == f"{scheme}://[::1]/orders"


@pytest.mark.parametrize("scheme", ["mysql", "mariadb", "mysql+pymysql", "mariadb+pymysql"])
def test_mysql(scheme: str) -> None:
    address = parse(f"{scheme}://me:s%40cret@db.example/orders?ssl_ca=ca.pem&ssl_verify_cert=yes")
    assert address.kind == "mysql"
    assert dict(address.server) == {
        "host": "db.example",
        "port": 3306,
        "user": "me",
        "password": "s@cret",
        "database": "orders",
        "ssl_ca": "ca.pem",
        "ssl_verify_cert": True,
    }
    assert address.shown == f"{scheme}://me@db.example/orders"


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:s3cret@host/db",
        "postgresql://me:s3cret@host",
        "postgresq://me:s3cret@host/db",
        "mysql://me:s3cret@host:x/db",
        "mysql://me:s3cret@host/db?nothing=1",
        "me:s3cret@host/db",
    ],
)
def test_a_password_is_never_shown(url: str) -> None:
    try:
        shown = repr(parse(url)) + parse(url).shown
    except InvalidURL as error:
        shown = str(error)
    assert "s3cret" not in shown


def test_a_wrong_address_is_refused_before_anything_is_awaited() -> None:
    with pytest.raises(InvalidURL):
        connect("sqlite://orders.db")
    with pytest.raises(InvalidURL, match=r"sqlite:///orders\.db"):
        connect(Path("orders.db"))  # type: ignore[arg-type]
