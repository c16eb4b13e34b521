"""`postroom restored`: a new incarnation, written down in the queue's database."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from postroom.address import parse
from postroom.store import open_store
from tests.contract.cli_runner import Cli


def incarnation(url: str) -> str:
    with closing(open_store(parse(url))) as store:
        return store.catalog.incarnation()


def test_restored(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/q.db"
    cli = Cli(tmp_path, url)
    missing = cli("restored")
    assert missing.code != 0 and not (tmp_path / "q.db").exists(), "to ask must not make a queue"
    cli.ok("topic", "create", "orders")
    before = incarnation(url)
    assert "was restored" in cli.ok("restored").out
    after = cli.ok("restored", "--json").json["incarnation"]
    assert before != after == incarnation(url)
    refused = Cli(tmp_path, "postroom://127.0.0.1:1")("restored")
    assert refused.code != 0 and "in the queue's database: name that with --url" in refused.err
