"""Jobs on a database server, and through a broker that asks for a token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deltalake
import pytest

import postroom.sync
from tests.contract.cli_runner import Cli
from tests.integration.spark.streams import send
from tests.integration.spark.writing_process import copy

TOKEN = "pst_" + "b" * 43


def archived(folder: Path) -> list[int]:
    values = deltalake.DeltaTable(folder / "lake" / "in").to_pyarrow_table()["value"].to_pylist()
    return sorted(int(value) for value in values)


def check_jobs(cli: Cli, folder: Path) -> None:
    """Archive and audit, as a user calls them: topic `in` has 200 messages."""
    done = cli.ok("pipeline", "archive", "in", "--to", str(folder / "lake"), "--json").json
    assert (done["messages"], done["behind"]) == (200, 0)
    assert archived(folder) == list(range(200))
    found = cli.ok("pipeline", "audit", "in", "--json").json
    assert (found["verdict"], found["counts"]["stored"]) == ("clean", 200)


def test_postgres(spark: Any, postgres_url: str, tmp_path: Path) -> None:
    with postroom.sync.connect(postgres_url, migrate=True) as mq:
        for topic in ("in", "out"):
            mq.create_topic(topic, partitions=2)
        send(mq, "in", 0, 200)
        check_jobs(Cli(tmp_path, postgres_url), tmp_path)
        checkpoint = str(tmp_path / "checkpoint")
        copy(spark, postgres_url, checkpoint).trigger(availableNow=True).start().awaitTermination(240)
        assert sorted(int(message.value) for message in mq.read("out", end="latest")) == list(range(200))


@pytest.mark.usefixtures("spark")
def test_a_broker(mq: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark's processes have an environment without the token, as executors elsewhere do."""
    mq.create_topic("in", partitions=2)
    send(mq, "in", 0, 200)
    with mq.serve("127.0.0.1", 0, token=TOKEN) as served:
        cli = Cli(tmp_path, served.url)
        refused = cli("pipeline", "audit", "in")
        assert refused.code != 0 and "this queue asks for a token" in refused.err
        monkeypatch.setenv("POSTROOM_TOKEN", TOKEN)
        check_jobs(cli, tmp_path)
