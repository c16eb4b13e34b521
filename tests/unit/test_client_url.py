"""Addresses: what is understood, and what a mistyped one is answered with."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock import InvalidURL, connect
from penstock.client.url import Address, parse


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("sqlite:///orders.db", Address(path=Path("orders.db"))),
        ("sqlite:///data/orders.db", Address(path=Path("data/orders.db"))),
        ("sqlite:////var/orders.db", Address(path=Path("/var/orders.db"))),
        ("sqlite:///C:/data/orders.db", Address(path=Path("C:/data/orders.db"))),
        ("sqlite:///~/orders.db", Address(path=Path.home() / "orders.db")),
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
        ("postgresql://localhost/db", "not in this version"),
        ("postgres://localhost/db", "not in this version"),
        ("mysql://localhost/db", "not in this version"),
        ("penstock://localhost:7070", "not in this version"),
        ("postgresq://localhost/db", "not in this version"),
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


def test_a_wrong_address_is_refused_before_anything_is_awaited() -> None:
    with pytest.raises(InvalidURL):
        connect("sqlite://orders.db")
    with pytest.raises(InvalidURL, match=r"sqlite:///orders\.db"):
        connect(Path("orders.db"))  # type: ignore[arg-type]
