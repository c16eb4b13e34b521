"""Tokens, certificates and permissions, from a client to a broker in a process of its own (R48)."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import postroom
import postroom.sync
from postroom.tls import client_context
from tests.certificates import Authority
from tests.contract.cli_runner import Cli

SECONDS = 60
WRONG = "pst_" + "x" * 43


class Queue:
    """A queue that is served, with TLS if there is an authority."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.cli = Cli(folder)
        self.tokens: list[str] = []
        self.admin = self.token("root", "manage:*")
        words = ("serve", "--port", "0", "--http-port", "0", "--log-format", "json", *words)
        self.process = self.cli.start(*words, bufsize=0)
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if b'"serving"' in line:
                self.url: str = json.loads(line)["url"]
                return
        raise AssertionError(f"it did not start: exit code {self.process.wait(SECONDS)}")

    def token(self, name: str, *permissions: str) -> str:
        allowed = [word for permission in permissions for word in ("--allow", permission)]
        token: str = self.cli.ok("access", "add", name, *allowed, "--json").json["token"]
        self.tokens.append(token)
        return token

    def end(self) -> str:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            out, err = self.process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        return (out + err).decode()


@pytest.fixture(scope="module")
def queue(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Queue]:
    made = Queue(tmp_path_factory.mktemp("queue"))
    yield made
    with pytest.raises(postroom.NotAuthenticated):
        postroom.sync.connect(made.url, token=WRONG)
    said = made.end()
    assert made.process.returncode == 0 and "was refused" in said
    assert not any(token in said for token in (*made.tokens, WRONG))


@pytest.fixture
async def admin(queue: Queue) -> AsyncIterator[postroom.Connection]:
    async with postroom.connect(queue.url, token=queue.admin) as mq:
        for topic in ("orders", "secret"):
            await mq.create_topic(topic, partitions=1, exist_ok=True)
        yield mq


async def test_nobody_comes_without_a_token(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POSTROOM_TOKEN", raising=False)
    for token in (None, WRONG, "x"):
        with pytest.raises(postroom.NotAuthenticated, match="token"):
            await postroom.connect(queue.url, token=token)


async def test_each_does_what_it_may(queue: Queue, admin: postroom.Connection) -> None:
    sends, reads = queue.token("web", "send:orders"), queue.token("billing", "consume:ord*")
    async with (
        postroom.connect(queue.url, token=sends) as web,
        postroom.connect(queue.url, token=reads) as billing,
    ):
        await web.send("orders", b"one")
        async with billing.consumer("orders", group="g") as consumer:
            (message,) = await consumer.poll(wait=20)
            await message.ack()
        assert [info.name for info in await web.topics()] == ["orders"]
        with pytest.raises(postroom.PermissionDenied, match="access grant web consume:orders"):
            async with web.consumer("orders", group="g") as consumer:
                await consumer.poll(wait=0)
        with pytest.raises(postroom.PermissionDenied, match="access grant web send:secret"):
            await web.send("secret", b"two")
        with pytest.raises(postroom.PermissionDenied, match="access grant billing send:orders"):
            await billing.send("orders", b"three")
        for refused in (web.delete_topic("orders"), web.create_topic("new"), billing.shards()):
            with pytest.raises(postroom.PermissionDenied, match="manage"):
                await refused
    with pytest.raises(postroom.PermissionDenied):
        await admin.send("orders", b"four")  # to manage is not to send


async def test_a_topic_is_not_reached_by_the_id_of_its_partition(
    queue: Queue, admin: postroom.Connection
) -> None:
    hidden = (await admin.route("secret")).ranges[0].partition_id
    token = queue.token("both", "send:orders", "consume:orders")
    async with postroom.connect(queue.url, token=token) as mq:
        endpoint: Any = mq._endpoint
        with pytest.raises(postroom.UnknownPartition):
            await endpoint.fetch("orders", hidden, 0, max_messages=1, max_bytes=1000, wait_ms=0)


async def test_what_was_revoked_ends_soon(queue: Queue, admin: postroom.Connection) -> None:
    token = queue.token("shortly", "send:orders")
    async with postroom.connect(queue.url, token=token) as mq:
        await mq.send("orders", b"one")
        queue.cli.ok("access", "remove", "shortly", "--yes")
        with pytest.raises(postroom.NotAuthenticated):
            await asyncio.wait_for(_send_on(mq), 20)  # two seconds, and what the machine takes
        with pytest.raises(postroom.NotAuthenticated):
            await postroom.connect(queue.url, token=token)


async def _send_on(mq: postroom.Connection) -> None:
    while True:
        await mq.send("orders", b"more", timeout=5)
        await asyncio.sleep(0.1)


async def test_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POSTROOM_TOKEN", raising=False)
    authority = Authority(tmp_path / "tls")
    server, client = authority.issue("mq"), authority.issue("shop")
    words = ("--tls-cert", server.cert, "--tls-key", server.key, "--tls-client-ca", authority.ca)
    queue = Queue(tmp_path, *words)
    try:
        queue.cli.ok("access", "add", "shop", "--allow", "manage:*", "--allow", "send:*", "--no-token")
        shop = client_context(authority.ca, cert=client.cert, key=client.key)
        async with postroom.connect(queue.url, tls=shop) as mq:
            await mq.create_topic("orders")
            await mq.send("orders", b"one")
        async with postroom.connect(queue.url, tls=authority.ca, token=queue.admin) as mq:
            assert (await mq.topics())[0].messages == 1
        with pytest.raises(postroom.NotAuthenticated):
            await postroom.connect(queue.url, tls=authority.ca)
        for tls in (None, True):
            with pytest.raises(postroom.BrokerUnavailable):
                await postroom.connect(queue.url, tls=tls, token=queue.admin)
    finally:
        queue.end()
