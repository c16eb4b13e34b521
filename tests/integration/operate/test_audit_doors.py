"""The audit log names whoever acts, through whichever door: one entry each, and the same for all of them."""

from __future__ import annotations

import asyncio
import getpass
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

import postroom
from postroom import AuditEntry, Connection, PermissionDenied
from postroom.broker.access import Gatekeeper, new_token
from postroom.broker.broker import Broker
from postroom.clock import SystemClock
from postroom.console.pages import add_console
from postroom.http.app import make_app
from postroom.model.access import ALL, Principal, hash_of, parse_permissions
from postroom.model.audit import Asker
from tests.contract.brokers import broker_of
from tests.contract.cli_runner import Cli
from tests.unit.http.http_client import API

HOSTILE = "<img src=x onerror=alert(1)>\x00\x1b[2Jä"


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path)


@pytest.fixture
async def mq(cli: Cli) -> AsyncIterator[Connection]:
    async with postroom.connect(cli.url) as mq:
        yield mq


def principal(mq: Connection, name: str, *permissions: str) -> str:
    token = new_token()
    granted = parse_permissions(permissions) if permissions else ALL
    broker_of(mq).store.access.add(Principal(name, granted), hash_of(token))
    return token


async def entry_of(mq: Connection, topic: str) -> AuditEntry:
    (found,) = await mq.audit_log(topic=topic)
    return found


@asynccontextmanager
async def served(mq: Connection, token: str) -> AsyncIterator[Connection]:
    """A client of a broker, with that token."""
    async with (
        await mq.serve(port=0, token="unused") as broker,
        postroom.connect(broker.url, token=token) as remote,
    ):
        yield remote


@asynccontextmanager
async def http(broker: Broker) -> AsyncIterator[httpx.AsyncClient]:
    app = make_app(broker, Gatekeeper(broker.store, broker.in_thread, SystemClock()))
    add_console(app)
    transport = httpx.ASGITransport(app, client=("10.1.2.3", 4567))
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        yield client


async def test_a_program_with_the_database_itself_is_its_user(mq: Connection) -> None:
    await mq.create_topic("orders")
    entry = await entry_of(mq, "orders")
    assert (entry.who, entry.door, entry.address) == (getpass.getuser(), "embedded", socket.gethostname())


async def test_a_client_of_a_broker_is_its_principal(mq: Connection) -> None:
    token = principal(mq, "shop")
    async with served(mq, token) as remote:
        await remote.create_topic("orders")
        assert (await remote.audit_log())[0] == (await mq.audit_log())[0]
    entry = await entry_of(mq, "orders")
    assert (entry.who, entry.door) == ("shop", "wire") and entry.address.startswith("127.0.0.1:")


async def test_somebody_who_is_no_administrator_cannot_read_it(mq: Connection) -> None:
    token = principal(mq, "shop", "manage:orders", "send:*", "consume:*")
    async with served(mq, token) as remote:
        await remote.create_topic("orders")
        for asked in (remote.audit_log(), remote.audit_log(topic="orders"), remote.principals()):
            with pytest.raises(PermissionDenied, match="manage"):
                await asked


async def test_http_and_the_console_are_told_apart(mq: Connection) -> None:
    token = principal(mq, "shop")
    async with http(broker_of(mq)) as client:
        bearer = {"Authorization": f"Bearer {token}"}
        made = await client.post(f"{API}/topics", json={"name": "by-http"}, headers=bearer)
        assert made.status_code == 201
        assert (await client.post("/console/login", json={"token": token})).status_code == 200
        csrf = (await client.get("/console/session")).json()["csrf"]
        made = await client.post(
            f"{API}/topics", json={"name": "by-console"}, headers={"X-Postroom-Csrf": csrf}
        )
        assert made.status_code == 201
        found = (await client.get(f"{API}/audit-log", params={"by": "shop", "limit": 1})).json()
        assert [(one["topic"], one["door"]) for one in found] == [("by-console", "console")]
        (older,) = (await client.get(f"{API}/audit-log", params={"before": found[0]["id"]})).json()
        assert older["topic"] == "by-http"
        assert (await client.get(f"{API}/audit-log", params={"since": "2001-01-01T00:00:00"})).json()
        for wrong in ({"limit": 0}, {"limit": 1001}, {"since": "then"}, {"before": -1}):
            assert (await client.get(f"{API}/audit-log", params=wrong)).status_code == 400, wrong
        (shown,) = (await client.get(f"{API}/principals")).json()
        assert (shown["name"], shown["token"]) == ("shop", True) and len(shown["permissions"]) == 3
        assert hash_of(token) not in json.dumps(shown)
    for topic, door in (("by-http", "http"), ("by-console", "console")):
        entry = await entry_of(mq, topic)
        assert (entry.who, entry.door, entry.address) == ("shop", door, "10.1.2.3:4567")


async def test_administration_by_kafka_clients_is_in_it(mq: Connection) -> None:
    from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, NewTopic, ResourceType

    from tests.kafka.integration.clients import PATIENCE_S, admin
    from tests.kafka.integration.test_access import login

    token = principal(mq, "shop")
    async with await mq.serve(port=0, token="unused", kafka=0) as broker:
        client = admin(str(broker.kafka), **login(token))

        def act() -> None:
            client.create_topics([NewTopic("orders", 1, 1)])["orders"].result(PATIENCE_S)
            change = ConfigEntry("retention.ms", "60000", incremental_operation=AlterConfigOpType.SET)
            resource = ConfigResource(ResourceType.TOPIC, "orders", incremental_configs=[change])
            (altered,) = client.incremental_alter_configs([resource]).values()
            altered.result(PATIENCE_S)
            client.delete_topics(["orders"])["orders"].result(PATIENCE_S)

        await asyncio.to_thread(act)
    found = await mq.audit_log(topic="orders")
    assert [entry.action for entry in found] == ["delete_topic", "alter_topic", "create_topic"]
    assert {(entry.who, entry.door, entry.address) for entry in found} == {("shop", "kafka", "127.0.0.1")}
    assert found[1].after == {"retention_ms": 60_000}


async def test_a_group_that_kafka_clients_delete_is_in_it(mq: Connection) -> None:
    from confluent_kafka import Consumer, TopicPartition

    from tests.kafka.integration.clients import PATIENCE_S, admin

    await mq.create_topic("orders", kafka_partitions=1)
    async with await mq.serve(port=0, kafka=0) as broker:
        address = str(broker.kafka)

        def act() -> None:
            consumer = Consumer({"bootstrap.servers": address, "group.id": "billing"})
            consumer.commit(offsets=[TopicPartition("orders", 0, 0)], asynchronous=False)
            consumer.close()
            asking = admin(address)  # what it promises ends with it
            asking.delete_consumer_groups(["billing"])["billing"].result(PATIENCE_S)

        await asyncio.to_thread(act)
    (entry,) = await mq.audit_log(limit=1)
    assert (entry.action, entry.group, entry.door, entry.outcome) == (
        "delete_group", "billing", "kafka", "done",
    )  # fmt: skip
    assert (entry.before, entry.after) == ({"mode": "kafka"}, None)


def test_the_command_line_and_what_it_does_to_access_are_in_it(cli: Cli) -> None:
    cli.ok("topic", "create", "orders")
    token = cli.ok("access", "add", "shop", "--allow", "send:orders", "--json").json["token"]
    cli.ok("access", "grant", "shop", "consume:orders")
    cli.ok("access", "rotate", "shop")
    cli.ok("access", "remove", "shop", "--yes")
    said = cli.ok("audit-log", "--json")
    actions = [one["action"] for one in said.json]
    assert actions == [
        "create_topic", "add_principal", "change_permissions", "rotate_token", "remove_principal",
    ]  # fmt: skip
    assert {(one["who"], one["door"]) for one in said.json} == {(getpass.getuser(), "cli")}
    assert said.json[2]["before"] == {"permissions": "send:orders"}
    assert said.json[2]["after"] == {"permissions": "send:orders consume:orders"}
    assert token not in said.out and hash_of(token) not in said.out
    shown = cli.ok("audit-log", "--limit", "3").out
    assert "permissions: send:orders → send:orders consume:orders" in shown
    assert [one["topic"] for one in cli.ok("audit-log", "--topic", "orders", "--json").json] == ["orders"]
    assert (
        cli.ok("audit-log", "--since", "1h", "--who", "nobody").out == "nobody has changed anything of that\n"
    )
    assert "use 2h" in cli("audit-log", "--since", "then").err


def test_the_command_line_goes_on_with_what_comes(cli: Cli) -> None:
    cli.ok("topic", "create", "orders")
    command = [sys.executable, "-m", "postroom", "audit-log", "--watch", "--json", "--url", cli.url]
    with subprocess.Popen([*command, "--interval", "50ms"], stdout=subprocess.PIPE, text=True) as watching:
        try:
            assert watching.stdout is not None
            assert json.loads(watching.stdout.readline())["topic"] == "orders"
            cli.ok("topic", "create", "payments")
            came = json.loads(watching.stdout.readline())
            while came["outcome"] == "begun":  # it was seen while it was done
                came = json.loads(watching.stdout.readline())
            assert (came["topic"], came["outcome"]) == ("payments", "done")
        finally:
            watching.terminate()


async def test_names_of_a_hostile_client_are_written_down_harmlessly(mq: Connection) -> None:
    token = principal(mq, "shop")
    async with served(mq, token) as remote:
        with pytest.raises(postroom.PostroomError):
            await remote._endpoint.delete_topic(HOSTILE)
    (entry,) = await mq.audit_log(limit=1)
    assert entry.action == "delete_topic" and entry.outcome != "done"
    assert entry.topic == "<img src=x onerror=alert(1)>\\x00\\x1b[2J\\xe4"


async def test_whoever_floods_it_does_not_push_out_what_others_did(mq: Connection) -> None:
    await mq.create_topic("orders")
    kept = await entry_of(mq, "orders")
    store = broker_of(mq).store

    def flood() -> None:
        for _ in range(200):
            store.audit.begin(Asker("eve", "wire", "10.6.6.6:1"), "pause", "mine", "g", {}, None, 40)

    await asyncio.to_thread(flood)
    entries = await mq.audit_log(limit=1000)
    assert kept in entries and len(entries) <= 40 + 50
