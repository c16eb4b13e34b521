"""From an earlier version to this one without a pause, under load: `postroom migrate`, then one by one (R34).

What was running when the tables were changed goes on. Clients and brokers of both versions work together,
whichever is the newer. No send is refused, nothing that was confirmed is lost or stored twice, and keys stay
in order. Only what is started on tables that do not fit it is refused, and says so.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import postroom
from postroom.store.sql.schema import VERSION
from tests.chaos.crew import Crew
from tests.chaos.stage import drained, judge, recovered
from tests.servers.places import free_port

from .founder import TOPICS
from .versions import Missing, before, fetch

_LEASE_S = 5
_SERVERS = {"postgres": "postgres_url", "mariadb": "mysql_url"}


@pytest.fixture
def old(migration: int, tmp_path: Path) -> Path:
    """Where the modules are of the last version without this migration."""
    try:
        return fetch(before(migration), tmp_path / "old")
    except Missing as missing:
        pytest.skip(f"the earlier version is not at hand: {missing}")


@pytest.mark.slow("replaces all processes of two versions one after the other, under load")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("kind", "migration"), [("postgres", 9), ("mariadb", VERSION), ("sqlite", VERSION)])
async def test_a_rolling_upgrade_refuses_nothing_and_loses_nothing(
    kind: str, old: Path, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    url = request.getfixturevalue(_SERVERS[kind]) if kind in _SERVERS else f"sqlite:///{tmp_path}/queue.db"
    await _run(old, "tests.upgrade.founder", url, str(_LEASE_S))
    if kind in _SERVERS:
        with pytest.raises(postroom.SchemaMismatch, match="run `postroom migrate`"):
            await postroom.connect(url)
    ports = [free_port(), free_port()]
    address = f"postroom://127.0.0.1:{ports[0]},127.0.0.1:{ports[1]}"
    with Crew(url, tmp_path, served=address, version=old) as crew:
        for port in ports:
            crew.serve(port)
        _hire(crew)
        await recovered(crew, "the beginning", time.monotonic())
        began = time.monotonic()
        await _run(None, "postroom", "migrate", "--url", url)
        await recovered(crew, "the tables were changed", began)
        with pytest.raises(AssertionError, match=rf"has schema version {VERSION}, and this postroom knows"):
            await _run(old, "tests.upgrade.founder", url)
        await _replace_all(crew)
        refused = crew.count("failed")
        crew.dismiss("producer")
        async with postroom.connect(url) as mq:
            for topic in TOPICS:
                await drained(mq, topic)
            for role in ("consumer", "broker"):
                crew.dismiss(role)
            for topic, groups in TOPICS.items():
                await judge(mq, crew, topic, groups=groups)
        assert refused == 0, f"{refused} messages were refused"


def _hire(crew: Crew) -> None:
    for topic, groups in TOPICS.items():
        for group, ordered in groups.items():
            crew.consume(topic, group, members=2, ordered=ordered)
    crew.produce("orders", "p0", pause_s=0.2)
    crew.produce("orders", "p1", pause_s=0.2)
    crew.produce("later", "r0", delays=(0.1, 2), pause_s=0.2)


async def _replace_all(crew: Crew) -> None:
    """First some clients, which meet older brokers; then the brokers, which meet older clients; then all."""
    crew.version = None
    first, *others = crew.of("producer")
    one, two, *rest = crew.of("consumer")
    for pid in (first, one):
        crew.kill(pid)
    await recovered(crew, "some clients are newer than the brokers", time.monotonic())
    for pid in crew.of("broker"):
        crew.restart(pid)
        await recovered(crew, "a broker was replaced", time.monotonic())
    for pid in (*others, two, *rest):
        crew.kill(pid)
    await recovered(crew, "all were replaced", time.monotonic())


async def _run(version: Path | None, module: str, *arguments: str) -> None:
    surroundings = os.environ if version is None else {**os.environ, "PYTHONPATH": str(version)}
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", module, *arguments],
        cwd=Path(__file__).parents[2],
        env=surroundings,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
