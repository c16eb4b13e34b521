"""The bank transfer: the books balance, whatever process dies and wherever (R30, R33).

What the other bank can never book comes back to who paid it, in the same manner.

One life after the other makes a transfer, relays and books, and is killed at the next step; the last one
comes to the end. So each life also takes over what the one before has left. All databases at once: most of it
is waiting.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import os
import signal
import sqlite3
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from postroom.broker.broker import Broker
from tests.integration.processes.children import child, received
from tests.integration.programs.programs import program, ran, until

PATIENCE_S = 100
START, CENTS = 10_000, 100
BY_STATEMENT = {
    "debited": "cents = cents -",
    "written": "INSERT INTO postroom_outbox ",
    "stamped": "UPDATE postroom_outbox_relay SET stamped",
    "deleted": "DELETE FROM postroom_outbox ",
    "seen": "INTO postroom_guards_seen",
    "booked": "cents = cents +",
}
STEPS = [
    "debited", "written", "paid", "stamped", "appended", "deleted", "seen", "booked", "committed", "acked",
    "",
]  # fmt: skip
STEPS_BACK = [
    "other: booked", "other: written", "transfers committed", "transfers acked", "other: stamped",
    "refunds appended", "other: deleted", "bank: seen", "bank: booked", "bank: given back",
    "refunds committed", "refunds acked", "",
]  # fmt: skip
BY_STATEMENT["given back"] = "state = 'given back'"


def lives(directory: str, bank: str, other: str, receiver: str, steps: list[str], pipe: Any) -> None:
    """In a process without threads or open connections, so that each life is a fork of it."""
    os.environ |= {
        "BANK_DB": bank,
        "OTHER_BANK_DB": other,
        "POSTROOM_URL": f"sqlite:///{directory}/queue.db",
        "LEASE": "500ms",
    }
    example = importlib.import_module("examples.bank_transfer.bank")
    _in_a_fork(lambda: _begin(example))
    for number, step in enumerate(steps, start=1):  # "": nobody kills the last one
        code = _in_a_fork(functools.partial(_live, example, number, receiver, step))
        pipe.send((step, code, *_books(example)))


def _in_a_fork(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        work()
        os._exit(0)
    finally:
        os._exit(1)


def _begin(example: Any) -> None:
    example.prepare()
    example.open_account(example.PAYS, "alice", START)
    example.open_account(example.IS_PAID, "bob", 0)


def _books(example: Any) -> tuple[int, int, int, int, int]:
    """What alice and bob have, how many transfers their banks know of, and how many were given back."""
    with example.PAYS.connect() as bank, example.IS_PAID.connect() as other:
        paid = bank.exec_driver_sql("SELECT COUNT(*) FROM transfers").scalar_one()
        back = bank.exec_driver_sql("SELECT COUNT(*) FROM transfers WHERE state = 'given back'").scalar_one()
        seen = other.exec_driver_sql("SELECT COUNT(*) FROM postroom_guards_seen").scalar_one()
    alice, bob = example.balance(example.PAYS, "alice"), example.balance(example.IS_PAID, "bob")
    for engine in (example.PAYS, example.IS_PAID):
        engine.dispose()
    return alice, bob, paid, seen, back


def _live(example: Any, number: int, receiver: str, step: str) -> None:
    """Make this transfer, and once more all before it: nobody told them whether theirs worked."""

    def at(here: str) -> None:
        if here == step:
            os.kill(os.getpid(), signal.SIGKILL)

    _watch(example, at)

    async def live() -> None:
        async with example.app.lifespan():
            for one in range(1, number + 1):
                await asyncio.to_thread(example.pay, example.Transfer(f"t-{one}", "alice", receiver, CENTS))
            at("paid")
            await asyncio.to_thread(_wait, example, number, receiver, step)
            os._exit(0)

    signal.alarm(PATIENCE_S // 2)  # a step that never comes
    asyncio.run(live())


def _watch(example: Any, at: Any) -> None:
    from sqlalchemy import event

    def executed(bank: str, _c: Any, _cursor: Any, statement: str, *_: Any) -> None:
        for step, text in BY_STATEMENT.items():
            if text in statement:
                at(step)
                at(f"{bank}: {step}")

    for bank, engine in {"bank": example.PAYS, "other": example.IS_PAID}.items():
        event.listen(engine, "after_cursor_execute", functools.partial(executed, bank))
    append, settle = Broker.append, Broker.settle

    async def appending(self: Any, topic: str, *args: Any, **kwargs: Any) -> Any:
        found = await append(self, topic, *args, **kwargs)
        at("appended")
        at(f"{topic} appended")
        return found

    async def settling(self: Any, topic: str, *args: Any, **kwargs: Any) -> Any:
        at("committed")
        at(f"{topic} committed")
        found = await settle(self, topic, *args, **kwargs)
        at("acked")
        at(f"{topic} acked")
        return found

    broker: Any = Broker
    broker.append, broker.settle = appending, settling


def _wait(example: Any, number: int, receiver: str, step: str) -> None:
    """For the death at that step; without one, until all the money has arrived, or is back."""
    while step or (_books(example)[1] < number * CENTS if receiver == "bob" else _books(example)[4] < number):
        time.sleep(0.02)


def _banks(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, tuple[str, str]]:
    """Two files on SQLite; on a server, as far as there is one, both banks are in one database."""
    found = {"sqlite": (f"sqlite:///{tmp_path}/bank.db", f"sqlite:///{tmp_path}/other.db")}
    for fixture, ours, theirs in (
        ("postgres_url", "postgresql:", "postgresql+psycopg:"),
        ("mysql_url", "mysql:", "mysql+pymysql:"),
    ):
        try:
            url = request.getfixturevalue(fixture).replace(ours, theirs)
        except pytest.skip.Exception:
            continue
        found[fixture] = (url, url)
    return found


@pytest.mark.slow("kills processes for seconds")
@pytest.mark.timeout(2 * PATIENCE_S)
def test_the_books_balance_whoever_dies(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    with ExitStack() as stack:
        pipes, last = {}, {}
        for kind, banks in _banks(request, tmp_path).items():
            directory = tmp_path / kind
            directory.mkdir()
            pipes[kind] = stack.enter_context(child(lives, str(directory), *banks, "bob", STEPS))[1]
        for number, step in enumerate(STEPS, start=1):
            for kind, pipe in pipes.items():
                told, code, alice, bob, paid, seen, back = received(pipe, max(1, deadline - time.monotonic()))
                assert (told, code) == (step, -signal.SIGKILL if step else 0), f"{kind} in life {number}"
                assert (START - alice, bob) == (CENTS * paid, CENTS * seen), (kind, step)
                assert number >= paid >= seen, (kind, step)  # the rest is on its way
                assert not back
                last[kind] = (alice, bob)
    assert set(last.values()) == {(START - CENTS * len(STEPS), CENTS * len(STEPS))}


@pytest.mark.slow("kills processes for seconds")
@pytest.mark.timeout(2 * PATIENCE_S)
def test_what_can_never_be_booked_is_given_back_whoever_dies(tmp_path: Path) -> None:
    """Nobody at the other bank is called carol."""
    deadline = time.monotonic() + PATIENCE_S
    banks = (f"sqlite:///{tmp_path}/bank.db", f"sqlite:///{tmp_path}/other.db")
    with child(lives, str(tmp_path), *banks, "carol", STEPS_BACK) as (_, pipe):
        for number, step in enumerate(STEPS_BACK, start=1):
            told, code, alice, bob, paid, _, back = received(pipe, max(1, deadline - time.monotonic()))
            assert (told, code) == (step, -signal.SIGKILL if step else 0), f"in life {number}"
            assert (START - alice, bob) == (CENTS * (paid - back), 0), step
    assert (alice, paid, back) == (START, len(STEPS_BACK), len(STEPS_BACK))


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    found = {"BANK_DB": f"sqlite:///{tmp_path}/bank.db", "OTHER_BANK_DB": f"sqlite:///{tmp_path}/other.db"}
    return found | {"POSTROOM_URL": f"sqlite:///{tmp_path}/queue.db"}


@pytest.mark.slow("starts seven programs")
def test_money_for_somebody_unknown_comes_back(places: dict[str, str]) -> None:
    """As the page says, as programs; `prepare` twice does no harm."""
    bank = functools.partial(ran, "examples.bank_transfer.bank", **places)
    assert bank("balance", "alice", status=1) == (
        "no such table: accounts: run `python -m examples.bank_transfer.bank prepare` first"
    )
    bank("prepare")
    bank("prepare")
    with program("postroom", "worker", "examples.bank_transfer.bank:app", **places):
        assert bank("transfer", "t-2", "alice", "carol", "100") == "paid"
        with closing(sqlite3.connect(places["BANK_DB"].removeprefix("sqlite:///"))) as books:
            until(lambda: books.execute("SELECT state FROM transfers").fetchall() == [("given back",)])
    assert bank("transfer", "t-2", "alice", "carol", "100") == "was given back before"
    assert bank("balance", "alice") == "alice has 10000 cents"


def test_what_is_typed_wrongly_at_the_bank_gets_a_sentence(
    places: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in places.items():
        monkeypatch.setenv(name, value)
    bank = importlib.reload(importlib.import_module("examples.bank_transfer.bank"))  # reads its environment
    bank.main("prepare")
    bank.main("transfer", "t-1", "alice", "bob", "2500")
    bank.main("transfer", "t-1", "alice", "bob", "2500")
    bank.main("balance", "alice")
    bank.main("balance", "carol")
    assert capsys.readouterr().out.splitlines() == [
        "paid", "was paid before", "alice has 7500 cents", "there is no account of carol",
    ]  # fmt: skip
    usage = bank.USAGE
    for wrong, said in {
        (): usage,
        ("rob",): usage,
        ("transfer", "t-3"): usage,
        ("transfer", "t-3", "alice", "bob", "much"): usage,
        ("transfer", "t-3", "alice", "bob", "-5"): usage,
        ("transfer", "t-3", "alice", "bob", "0"): "nothing to transfer: name a number of cents from 1 up",
        ("transfer", "t-3", "zoe", "bob", "5"): "zoe has less than 5 cents",
        ("transfer", "t-1", "alice", "bob", "9"): "t-1 is the number of another transfer: choose a new one",
    }.items():
        with pytest.raises(bank.Refused) as refused:
            bank.main(*wrong)
        assert str(refused.value) == said
    bank.PAYS.dispose()
    bank.IS_PAID.dispose()
