"""`postroom access`: principals by the command line. Tokens are shown once, and never stored."""

from __future__ import annotations

from pathlib import Path

import pytest

from postroom.model.access import hash_of, is_token
from postroom.model.moves.staging import Wish
from postroom.store import open_sqlite
from tests.contract.cli_runner import Cli


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path)


def token_in(text: str) -> str:
    (found,) = (word for word in text.split() if is_token(word))
    return found


def principal_with(cli: Cli, token: str) -> str | None:
    store = open_sqlite(cli.folder / "queue.db")
    try:
        found = store.access.by_secret(hash_of(token))
        return found.name if found else None
    finally:
        store.close()


def test_a_token_is_shown_when_it_is_made_and_never_again(cli: Cli) -> None:
    token = token_in(cli.ok("access", "add", "shop", "--allow", "send:orders", "--allow", "consume:*").out)
    assert principal_with(cli, token) == "shop"
    for words in (["access", "list"], ["access", "list", "--json"], ["access", "grant", "shop", "send:x"]):
        answer = cli.ok(*words)
        assert token not in answer.out and hash_of(token) not in answer.out
    for path in cli.folder.iterdir():
        assert token.encode() not in path.read_bytes()


def test_who_there_is(cli: Cli) -> None:
    assert "no principals yet" in cli.ok("access", "list", "--url", _made(cli)).out
    cli.ok("access", "add", "shop", "--allow", "send:orders", "--allow", "consume:*")
    cli.ok("access", "add", "audit", "--no-token")
    first, second = cli.ok("access", "list", "--json").json
    assert (first["principal"], first["permissions"]) == ("audit", [])
    assert (second["principal"], second["permissions"]) == ("shop", ["send:orders", "consume:*"])
    table = cli.ok("access", "list").out
    assert "shop       send:orders consume:*  yes" in table and "none" in table


def _made(cli: Cli) -> str:
    cli.ok("topic", "create", "orders")
    return cli.url


def test_a_query_is_given_to_another_principal(cli: Cli) -> None:
    _made(cli)
    for name in ("shop", "shop-2"):
        cli.ok("access", "add", name, "--allow", "send:orders")
    assert "look at the name" in cli("access", "give-query", "hourly", "shop-2").err
    store = open_sqlite(cli.folder / "queue.db")
    try:
        store.staging.decide("hourly", 0, Wish(), 7, owner="shop")
        assert "there is no principal 'shop-3'" in cli("access", "give-query", "hourly", "shop-3").err
        assert store.staging.known("hourly").owner == "shop"
        said = cli.ok("access", "give-query", "hourly", "shop-2").out
        assert said == "query hourly belongs to principal shop-2\n"
        assert store.staging.known("hourly").owner == "shop-2"
        answer = cli.ok("access", "give-query", "hourly", "shop", "--json").json
        assert answer == {"query": "hourly", "principal": "shop"}
    finally:
        store.close()


def test_one_with_a_certificate_has_no_token(cli: Cli) -> None:
    answer = cli.ok("access", "add", "shop", "--no-token", "--json").json
    assert answer["token"] is None
    assert "client certificate" in cli.ok("access", "add", "other", "--no-token").out


def test_permissions_come_and_go(cli: Cli) -> None:
    cli.ok("access", "add", "shop", "--allow", "send:orders")
    answer = cli.ok("access", "grant", "shop", "consume:orders", "manage:*", "--json").json
    assert answer["permissions"] == ["send:orders", "consume:orders", "manage:*"]
    assert "may consume:orders" in cli.ok("access", "revoke", "shop", "manage:*", "send:orders").out
    refused = cli("access", "revoke", "shop", "send:orders", "--json")
    assert refused.code == 2 and "it has: consume:orders" in refused.error["message"]


def test_a_rotated_token_ends(cli: Cli) -> None:
    old = token_in(cli.ok("access", "add", "shop", "--allow", "send:orders").out)
    new = cli.ok("access", "rotate", "shop", "--json").json["token"]
    assert (principal_with(cli, old), principal_with(cli, new)) == (None, "shop")
    assert cli.ok("access", "list", "--json").json[0]["permissions"] == ["send:orders"]


def test_one_that_is_removed_is_gone(cli: Cli) -> None:
    token = token_in(cli.ok("access", "add", "shop", "--allow", "send:orders").out)
    assert cli("access", "remove", "shop").code == 4
    assert principal_with(cli, token) == "shop"
    cli.ok("access", "remove", "shop", "--yes")
    assert principal_with(cli, token) is None
    assert cli.ok("access", "list", "--json").json == []


@pytest.mark.parametrize(
    ("words", "code", "error", "says"),
    [
        (["add", "shop", "--allow", "read:orders"], 2, "invalid_setting", "send, consume, manage"),
        (["add", "shop", "--allow", "orders"], 2, "invalid_setting", "such as send:orders"),
        (["add", "sh op"], 2, "invalid_name", "such as 'shop'"),
        (["add", "anonymous"], 2, "invalid_name", "reserved"),
        (["add", "there"], 1, "principal_exists", "postroom access rotate there"),
        (["grant", "nobody", "send:x"], 1, "unknown_principal", "postroom access add nobody"),
        (["revoke", "nobody", "send:x"], 1, "unknown_principal", "there"),
        (["rotate", "nobody"], 1, "unknown_principal", "(there are: there)"),
        (["remove", "nobody", "--yes"], 1, "unknown_principal", "nobody"),
        (["list", "--url", "memory://"], 2, "invalid_url", "the queue's database"),
        (["list", "--url", "postroom://127.0.0.1:7070"], 2, "invalid_url", "the queue's database"),
    ],
)
def test_what_is_refused(cli: Cli, words: list[str], code: int, error: str, says: str) -> None:
    cli.ok("access", "add", "there")
    answer = cli("access", *words, "--json")
    assert (answer.code, answer.error["error"]) == (code, error) and says in answer.error["message"]


def test_looking_makes_no_file(cli: Cli) -> None:
    for words in (["list"], ["grant", "shop", "send:x"], ["rotate", "shop"], ["remove", "shop", "--yes"]):
        assert cli("access", *words).code == 1
    assert list(cli.folder.iterdir()) == []
