"""`postroom send`, `consume` and `read`: what goes in comes out."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from uuid import uuid4

import pytest

from postroom.model.messages.batch import BatchBuilder
from postroom.store import open_sqlite
from postroom.store.contract import Append
from tests.contract.cli_runner import Cli


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    cli = Cli(tmp_path)
    cli.ok("topic", "create", "orders", "--partitions", "2")
    return cli


def test_a_message_that_no_calendar_has_a_time_for_is_shown(cli: Cli, tmp_path: Path) -> None:
    """Earlier versions took microseconds for milliseconds; now nobody can send them."""
    builder = BatchBuilder()
    builder.append(1_795_000_000_000_000, None, b"odd", [])
    store = open_sqlite(tmp_path / "queue.db")
    place = store.catalog.topic("orders").route.ranges[0].partition_id
    store.log.append([Append(place, builder.build())])
    store.close()
    assert cli.ok("read", "orders", "--json").lines[0]["timestamp"] == "1795000000000000 ms"


# --- send --------------------------------------------------------------------------------------------


def test_a_message_with_key_headers_and_id(cli: Cli) -> None:
    receipt = cli.ok(
        "send", "orders", "hello", "-k", "42", "-H", "source=web", "-H", "a=b=c", "--id", "o-1", "--json"
    )
    assert receipt.json["id"] == "o-1" and receipt.json["offset"] == 0
    (message,) = cli.ok("read", "orders", "--json").lines
    assert (message["value"], message["key"], message["id"]) == ("hello", "42", "o-1")
    assert message["headers"] == {"source": "web", "a": "b=c"}


def test_each_line_is_a_message(cli: Cli) -> None:
    answer = cli.ok("send", "orders", "-", "--key", "k", stdin="one\n\nthree")
    assert answer.out.startswith("sent 3 messages to orders in ")
    assert cli.ok("read", "orders").out == "one\n\nthree\n"


def test_lines_come_from_a_pipe_without_a_dash_too(cli: Cli) -> None:
    assert cli.ok("send", "orders", "--json", stdin="one\ntwo\n").json["sent"] == 2
    assert cli.ok("send", "orders", "--json", stdin="").json["sent"] == 0


def test_many_lines_arrive_once_each(cli: Cli) -> None:
    count = 30_000
    cli.ok("send", "orders", "-", stdin="".join(f"{n}\n" for n in range(count)))
    got = cli.ok("read", "orders").out.split()
    assert len(got) == count and set(got) == {str(n) for n in range(count)}


def test_bytes_pass_through_unchanged(cli: Cli) -> None:
    raw = bytes(byte for byte in range(256) if byte != 10)
    cli.ok("send", "orders", "-", stdin=raw + b"\n")
    (message,) = cli.ok("read", "orders", "--json").lines
    assert base64.b64decode(message["value_base64"]) == raw


def test_json_lines_have_their_own_key_headers_and_id(cli: Cli) -> None:
    lines = [
        {"value": "a", "key": "k1", "headers": {"h": "1"}, "id": "i1"},
        {"value": {"n": 1, "t": "ü"}},
        {"value_base64": base64.b64encode(b"\xff\x00").decode(), "key": "k2"},
    ]
    cli.ok("send", "orders", "--jsonl", "-k", "default", stdin="\n".join(map(json.dumps, lines)) + "\n\n")
    found = {m["key"]: m for m in cli.ok("read", "orders", "--json").lines}
    assert (found["k1"]["value"], found["k1"]["headers"], found["k1"]["id"]) == ("a", {"h": "1"}, "i1")
    assert json.loads(found["default"]["value"]) == {"n": 1, "t": "ü"}
    assert base64.b64decode(found["k2"]["value_base64"]) == b"\xff\x00"


def test_what_read_writes_send_takes_back(cli: Cli) -> None:
    cli.ok("send", "orders", "hello", "-k", "42", "-H", "source=web", "--id", "o-1")
    copy = cli.ok("read", "orders", "--json").out
    cli.ok("topic", "create", "copies")
    cli.ok("send", "copies", "--jsonl", stdin=copy)
    (before,), (after,) = json.loads(f"[{copy}]"), cli.ok("read", "copies", "--json").lines
    for name in ("id", "key", "value", "headers"):
        assert before[name] == after[name]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "no JSON"),
        ("[1]", "must be an object"),
        ('{"key": "k"}', '"value" is missing'),
        ('{"value": "v", "header": {}}', "unknown field 'header'"),
        ('{"value_base64": "!"}', "not base64"),
        ('{"value": "v", "headers": {"n": 1}}', "header"),
        ('{"value": "v", "headers": "n"}', "headers"),
        ('{"value": "v", "id": 7}', "id"),
    ],
)
def test_a_wrong_line_is_named(cli: Cli, line: str, complaint: str) -> None:
    answer = cli("send", "orders", "--jsonl", stdin=f'{{"value": "fine"}}\n{line}\n')
    assert answer.code == 2 and "line 2: " in answer.err and complaint in answer.err
    assert "nothing was sent" in answer.err
    assert cli.ok("read", "orders").out == ""


# --- consume -----------------------------------------------------------------------------------------


def test_consume_prints_then_acks(cli: Cli) -> None:
    cli.ok("send", "orders", stdin="a\nb\nc\n")
    printed = cli.ok("consume", "orders", "-g", "g", "--create", "--wait", "50ms").out
    assert sorted(printed.split()) == ["a", "b", "c"]
    assert cli.ok("consume", "orders", "-g", "g", "--wait", "0").out == ""
    assert cli.ok("lag", "orders", "g", "--json").json[0]["messages"] == 0


def test_no_ack_takes_nothing_away(cli: Cli) -> None:
    cli.ok("send", "orders", stdin="a\nb\n")
    taken = cli.ok("consume", "orders", "-g", "g", "--create", "--wait", "50ms", "--no-ack").out
    assert len(taken.split()) == 2
    again = cli.ok("consume", "orders", "-g", "g", "-n", "2", "--json").lines
    assert [message["attempt"] for message in again] == [1, 1]


def test_a_group_that_is_not_there_is_not_made_by_a_slip(cli: Cli) -> None:
    """R44: a mistyped name would make a group that holds messages for ever."""
    cli.ok("group", "create", "orders", "billing")
    cli.ok("group", "create", "orders", "audit")
    for last in ((), ("--json",)):
        answer = cli("consume", "orders", "-g", "biling", "-w", "0", *last)
        assert answer.code == 4 and answer.out == ""
        assert (
            "topic 'orders' has no group 'biling'; it has audit, billing. Did you mean billing?" in answer.err
        )
        assert "add --create to make it" in answer.err
    assert [g["group"] for g in cli.ok("group", "list", "orders", "--json").json] == ["audit", "billing"]
    made = cli.ok("consume", "orders", "-g", "shipping", "--start", "latest", "-w", "0", "--create")
    assert "group shipping of orders is new; it starts with the next message" in made.err
    assert "is new" not in cli.ok("consume", "orders", "-g", "billing", "-w", "0", "--create").err


def test_a_new_member_of_a_broadcast_group_is_no_new_group(cli: Cli) -> None:
    words = ("consume", "orders", "-g", "cache", "-w", "0")
    made = cli.ok(*words, "--mode", "broadcast", "--member", "ann", "--create")
    assert "group cache of orders is new, in mode broadcast; it starts at the earliest message" in made.err
    assert "is new" not in cli.ok(*words, "--member", "bob").err


def test_an_id_that_the_topic_does_not_look_at(cli: Cli) -> None:
    """S2: said on stderr, and once; with a delay the id is what takes it back."""
    name = f"ids-{uuid4().hex[:8]}"  # what was said of another topic does not count
    cli.ok("topic", "create", name)
    assert "does not look at ids" not in cli.ok("send", name, "a", "--id", "1", "--delay", "1h").err
    answer = cli.ok("send", name, "a", "--id", "1", "--json")
    assert (
        f"note: topic {name} does not look at ids: what is sent twice under one id is stored twice"
        in answer.err
    )
    assert f"`postroom topic alter {name} --dedup-window 10m`" in answer.err and answer.json["id"] == "1"
    cli.ok("topic", "create", f"{name}-2", "--dedup-window", "10m")
    assert cli.ok("send", f"{name}-2", "a", "--id", "1").err == ""


def test_a_template_formats(cli: Cli) -> None:
    cli.ok("send", "orders", "v", "-k", "k", "-H", "h=1")
    shown = cli.ok("read", "orders", "-f", "{partition}:{offset} {key}={value} [{headers}]").out
    assert shown.split(":")[1] == "0 k=v [h=1]\n"
    assert " key=k h=1  v\n" in cli.ok("read", "orders", "--format", "full").out


# --- read --------------------------------------------------------------------------------------------


def test_read_starts_and_ends_where_it_is_told(cli: Cli) -> None:
    cli.ok("topic", "create", "one", "-p", "1")
    cli.ok("send", "one", stdin="".join(f"{n}\n" for n in range(10)))

    def read(*words: str) -> list[str]:
        return cli.ok("read", "one", *words).out.split()

    assert read("--limit", "2") == ["0", "1"]
    assert read("--start", "0=8") == ["8", "9"]
    assert read("--start", "3", "--end", "5", "--partition", "0") == ["3", "4"]
    assert read("--start", "latest") == []
    answer = cli("read", "one", "--start", "2199-01-01T00:00:00Z")
    assert answer.code == 2 and "is in the future" in answer.err
    assert len(read("--start", "2020-01-01T00:00:00Z")) == 10


def test_following_ends_with_the_limit(cli: Cli) -> None:
    cli.ok("send", "orders", stdin="a\nb\n")
    assert len(cli.ok("read", "orders", "--follow", "--start", "earliest", "-n", "2").out.split()) == 2
