"""Several databases on the command line: how they are named, listed, filled and drained (R6, R28)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import postroom
from postroom.cli.framework.command import shard_text, shard_urls
from postroom.errors import InvalidSetting
from postroom.store.sql.schema import VERSION
from tests.contract.cli_runner import Answer, Cli


class ShardedCli(Cli):
    """A queue with the shards first and b; every command is told of b, unless `told` is False."""

    def __init__(self, folder: Path, url: str | None = None, other: str | None = None) -> None:
        super().__init__(folder, url)
        self.other = other or f"sqlite:///{folder / 'b.db'}"
        self.told = True

    def __call__(self, *words: str, stdin: str | bytes = "") -> Answer:
        return super().__call__(*words, *(["--shard", f"b={self.other}"] if self.told else []), stdin=stdin)

    def states(self) -> dict[str, tuple[str, int, int, int]]:
        found = self.ok("shard", "list", "--json").json
        return {s["shard"]: (s["state"], s["partitions"], s["sealed"], s["delayed"]) for s in found}


@pytest.fixture
def cli(tmp_path: Path) -> ShardedCli:
    """Topic orders, partitions 0 and 1, one on each shard, with four messages each."""
    cli = ShardedCli(tmp_path)
    _fill(cli)
    return cli


def _fill(cli: ShardedCli) -> None:
    cli.ok("topic", "create", "orders", "-p", "2")
    cli.ok("group", "create", "orders", "billing", "--mode", "ordered")
    cli.ok(
        "send", "orders", "--jsonl", stdin="".join(f'{{"value": "{n}", "key": "{n}"}}\n' for n in range(8))
    )


def _homes(cli: ShardedCli) -> dict[int, str]:
    found = cli.ok("route", "show", "orders", "--json").json["partitions"]
    return {p["partition"]: p["shard"] for p in found if not p["sealed"]}


# --- naming them -------------------------------------------------------------------------------------


def test_options_beat_the_environment_and_may_stand_anywhere(
    cli: ShardedCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    b, cli.told = f"b={cli.other}", False
    everybody = ["first", "b"]
    for words in (
        ["--shard", b, "shard", "list"],
        ["shard", "--shard", b, "list"],
        ["shard", "list", "--shard", b],
    ):
        assert [s["shard"] for s in cli.ok(*words, "--json").json] == everybody
    monkeypatch.setenv("POSTROOM_SHARDS", b)
    assert [s["shard"] for s in cli.ok("shard", "list", "--json").json] == everybody
    monkeypatch.setenv("POSTROOM_SHARDS", f"b=sqlite:///{cli.folder / 'none.db'}")
    assert [s["shard"] for s in cli.ok("shard", "list", "--shard", b, "--json").json] == everybody


@pytest.mark.parametrize("options", [["b"], ["=sqlite:///b.db"], ["b=secret"], ["mysql://u:secret@h/b?a=b"]])
def test_what_is_no_shard_is_refused_and_not_shown(options: list[str]) -> None:
    for found in (lambda: shard_urls(options, ""), lambda: shard_urls([], options[0])):
        with pytest.raises(InvalidSetting) as error:
            found()
        assert "secret" not in str(error.value) and "=" in str(error.value)


def test_a_comma_in_a_url_of_the_environment_is_explained() -> None:
    with pytest.raises(InvalidSetting, match="a comma inside a URL is not allowed there") as error:
        shard_urls([], "b=mysql://user:se,cret@host/b")
    assert "cret" not in str(error.value)
    with pytest.raises(InvalidSetting, match="names shard 'b' twice"):
        shard_urls(["b=sqlite:///b.db", "b=sqlite:///c.db"], "")
    urls = {"b": "mysql://user:se,cret@host/b", "c": "sqlite:///c.db"}
    assert shard_urls([], shard_text(urls)) == {**urls, "b": "mysql://user:se%2Ccret@host/b"}


def test_wrong_usage_of_the_option(cli: ShardedCli) -> None:
    cli.told = False
    answer = cli("lag", "orders", "--shard", "b", "--json")
    assert answer.code == 2 and answer.error["error"] == "invalid_setting"
    answer = cli("lag", "orders", "--shard", "first=sqlite:///b.db")
    assert answer.code == 2 and "choose another name" in answer.err


def test_a_mistyped_file_is_not_made(cli: ShardedCli) -> None:
    cli.told = False
    for words in (["shard", "list"], ["send", "orders", "x"], ["migrate"], ["shard", "drain", "b", "--yes"]):
        answer = cli(*words, "--shard", f"b=sqlite:///{cli.folder / 'bb.db'}")
        assert answer.code == 1 and "for shard 'b'" in answer.err
    assert not list(cli.folder.glob("bb*"))


def test_a_shard_that_is_needed_and_missing(cli: ShardedCli) -> None:
    cli.told = False
    answer = cli("topic", "list")
    assert answer.code == 2 and "add --shard b=URL" in answer.err


def test_migrate_and_doctor_look_at_every_database(cli: ShardedCli) -> None:
    assert [line["version"] for line in cli.ok("migrate", "--check", "--json").lines] == [VERSION, VERSION]
    checks = [f["check"] for f in cli.ok("doctor", "--json").json["checks"]]
    assert {"log lane", "b: log lane"} <= set(checks)


# --- moving ------------------------------------------------------------------------------------------


def test_a_new_shard_joins_with_the_first_move(tmp_path: Path) -> None:
    """R25; the file of a new shard is made by what puts something there."""
    cli = ShardedCli(tmp_path)
    cli.told = False
    _fill(cli)
    cli.told = True
    dry = cli("route", "move", "orders", "0", "--to", "b", "--dry-run")
    assert dry.code == 1 and not (tmp_path / "b.db").exists()
    moved = cli.ok("route", "move", "orders", "0", "--to", "b", "--json").json
    assert [(p["partition"], p["shard"]) for p in moved["opened"]] == [(2, "b")]
    assert _homes(cli) == {2: "b", 1: "first"}
    dry = cli.ok("route", "move", "orders", "2", "--to", "first", "--dry-run", "--json")
    assert [r["shard"] for r in dry.json["after"]["ranges"]] == ["first", "first"]
    assert _homes(cli) == {2: "b", 1: "first"}
    cli.ok("route", "move", "orders", "2", "--to", "first")
    assert _homes(cli) == {3: "first", 1: "first"}
    cli.ok("route", "move", "orders", "1")  # to the emptiest
    assert _homes(cli) == {3: "first", 4: "b"}


def test_a_dry_move_needs_to_know_where(cli: ShardedCli) -> None:
    answer = cli("route", "move", "orders", "0", "--dry-run")
    assert answer.code == 2 and "--dry-run needs --to" in answer.err


# --- draining ----------------------------------------------------------------------------------------


@pytest.fixture(params=["sqlite", "servers"])
def any_cli(request: pytest.FixtureRequest, tmp_path: Path) -> ShardedCli:
    if request.param == "sqlite":
        cli = ShardedCli(tmp_path)
    else:
        first, other = (str(request.getfixturevalue(name)) for name in ("postgres_url", "mysql_url"))
        cli = ShardedCli(tmp_path, first, other)
        cli.ok("migrate")
    _fill(cli)
    return cli


@pytest.mark.slow("waits for a round of retention in real time; docs/howto/shards.md drains a shard, too")
def test_drain_in_two_phases(any_cli: ShardedCli) -> None:
    """R28, I11: it says what it waits for, then that it is empty, and then it may be left out."""
    cli = any_cli
    (there,) = [number for number, shard in _homes(cli).items() if shard == "b"]
    refused = cli("shard", "drain", "b")
    assert refused.code == 4 and "1 partition will be moved" in refused.err
    assert cli.states()["b"][:2] == ("open", 1)

    said = cli.ok("shard", "drain", "b", "--yes").out
    assert "1 partition moved off it" in said and "not empty yet" in said
    assert f"partition {there} of topic orders is sealed, and billing has to read it to its end" in said
    assert cli.states()["b"][:3] == ("draining", 0, 1) and set(_homes(cli).values()) == {"first"}
    again = cli.ok("shard", "drain", "b", "--json").json
    assert again["waits"] == [{"topic": "orders", "partition": there, "groups": ["billing"]}]

    cli.read_all("orders", "billing")
    assert "retention keeps it for 7d" in cli.ok("shard", "drain", "b").out
    cli.ok("topic", "alter", "orders", "--drop-settled")
    done = cli.ok("shard", "drain", "b", "--wait")
    assert "shard b is empty" in done.out
    cli.told = False
    assert cli.states() == {"first": ("open", 2, 0, 0)}


@pytest.mark.slow("starts programs")
def test_delayed_messages_are_waited_for(cli: ShardedCli) -> None:
    for key in range(20):  # on both shards
        cli.ok("send", "orders", "later", "--delay", "1h", "--key", str(key))
    waiting = cli.states()["b"][3]
    assert 0 < waiting < 20
    said = cli.ok("shard", "drain", "b", "--yes").out
    assert f"{waiting} messages wait there until due" in said


def test_dead_letters_are_waited_for(cli: ShardedCli) -> None:
    cli.ok("group", "create", "orders", "mail")
    asyncio.run(_give_up_on_all(cli))
    if cli.ok("route", "show", "orders.mail.dead", "--json").json["partitions"][0]["shard"] != "b":
        cli.ok("route", "move", "orders.mail.dead", "0", "--to", "b")
    said = cli.ok("shard", "drain", "b", "--yes").out
    assert "of topic orders.mail.dead is sealed, with dead letters in it: redrive or discard them" in said
    assert len(cli.ok("dead", "list", "orders", "mail", "--json").json) == 8
    cli.ok("dead", "discard", "orders", "mail", "--yes")
    assert "postroom topic alter orders.mail.dead --drop-settled" in cli.ok("shard", "drain", "b").out


async def _give_up_on_all(cli: ShardedCli) -> None:
    async with (
        postroom.connect(cli.url, shards={"b": cli.other}) as mq,
        mq.consumer("orders", group="mail") as consumer,
    ):
        for _ in range(8):
            (message,) = await consumer.poll(1, wait=20)
            await message.dead("no such customer")


@pytest.mark.parametrize(
    ("words", "code", "hint"),
    [
        (["drain", "first", "--yes"], 2, "`postroom route move`"),
        (["drain", "c", "--yes"], 2, "there is first, b"),
        (["open", "c"], 2, "there is first, b"),
    ],
)
def test_what_cannot_be_drained(cli: ShardedCli, words: list[str], code: int, hint: str) -> None:
    answer = cli("shard", *words)
    assert answer.code == code and hint in answer.err
    assert cli.states() == {"first": ("open", 1, 0, 0), "b": ("open", 1, 0, 0)}


def test_a_drained_shard_takes_partitions_again(cli: ShardedCli) -> None:
    cli.ok("shard", "drain", "b", "--yes")
    answer = cli("route", "move", "orders", "0", "--to", "b")
    assert answer.code == 2 and "`postroom shard open`" in answer.err
    assert cli.ok("shard", "open", "b", "--json").json["state"] == "open"
    cli.ok("route", "move", "orders", "0", "--to", "b")
    assert "b" in _homes(cli).values()


# --- through the SDK and back ------------------------------------------------------------------------


def test_what_the_command_line_made_the_sdk_opens(cli: ShardedCli) -> None:
    asyncio.run(_open(cli))


async def _open(cli: ShardedCli) -> None:
    async with postroom.connect(cli.url, shards={"b": cli.other}) as mq:
        assert [info.name for info in await mq.shards()] == ["first", "b"]
        assert (await mq.topic("orders")).messages == 8


# --- a shard that is away ----------------------------------------------------------------------------


def test_a_shard_that_is_away_is_shown_and_not_drained(tmp_path: Path, postgres_url: str) -> None:
    """R6, R28: the rest goes on, and what is not known is said to be unknown."""
    cli = ShardedCli(tmp_path, other=postgres_url)
    Cli(tmp_path, postgres_url).ok("migrate")
    _fill(cli)
    behind = {
        part["partition"] for part in cli.ok("lag", "orders", "billing", "--json").json[0]["partitions"]
    }
    assert behind == {0, 1}
    cli.other = "postgresql://nobody@127.0.0.1:1/none"
    assert cli.states() == {"first": ("open", 1, 0, 0), "b": ("away", 1, 0, None)}
    answer = cli.ok("route", "show", "orders", "--json")
    assert [p["end"] for p in answer.json["partitions"]] == [None, None] and "shard 'b' is away" in answer.err
    assert "what waits there is not counted" in cli.ok("lag", "orders").err
    cli.ok("send", "orders", "without a key")
    refused = cli("shard", "drain", "b", "--yes", "--json")
    assert refused.code == 1 and refused.error["error"] == "store_unavailable"
    assert "Start its database" in refused.error["message"]


# --- shards that somebody does not know --------------------------------------------------------------


async def test_a_move_to_where_a_program_cannot_reach_is_refused_and_names_it(
    cli: ShardedCli, tmp_path: Path
) -> None:
    words = ("route", "move", "orders", "0", "--to", "c", "--shard", f"c=sqlite:///{tmp_path}/c.db")
    async with postroom.connect(cli.url, shards={"b": cli.other}, client_id="shop-1"):
        refused = await asyncio.to_thread(cli, *words)
    assert refused.code == 1
    assert refused.err.startswith(
        "error: shard 'c' is not known to all that use this queue: program shop-1 could not reach what is "
        "put there. Give them its address (shards= of connect(), POSTROOM_SHARDS, or [shards] of a broker's "
    )
    assert "shard c)" in (await asyncio.to_thread(cli.ok, *words)).out


async def test_a_served_queue_is_moved_by_those_who_have_no_addresses(
    cli: ShardedCli, tmp_path: Path
) -> None:
    """And they are never told to name a database."""
    shards = {"b": cli.other}
    async with postroom.connect(cli.url, shards=shards) as mq, await mq.serve(port=0) as server:
        home = next(piece for piece in (await mq.route("orders")).ranges if piece.shard == "first")
        client = Cli(tmp_path, server.url)
        move = ("route", "move", "orders", str(home.partition))
        assert "shard b)" in (await asyncio.to_thread(client.ok, *move, "--to", "b")).out
        await asyncio.to_thread(client.ok, "route", "move", "orders", "2", "--to", "first")
        strange = await asyncio.to_thread(client, "route", "move", "orders", "3", "--to", "zz")
        assert strange.code == 2
        assert "there is no shard 'zz'; there is first, b" in strange.err
        third = {**shards, "c": f"sqlite:///{tmp_path}/c.db"}
        async with postroom.connect(cli.url, shards=third):
            refused = await asyncio.to_thread(client, "route", "move", "orders", "3", "--to", "c")
        assert refused.code == 1
        assert "Ask the operator of the brokers to give them its address" in refused.err
        assert "shards=" not in refused.err
