"""The bank transfer: the books balance, whatever process dies and wherever (R30, R33).

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
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from postroom.broker.embedded import Broker
from tests.integration.children import child, received

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


def lives(directory: str, bank: str, other: str, pipe: Any) -> None:
    """In a process without threads or open connections, so that each life is a fork of it."""
    os.environ |= {
        "BANK_DB": bank,
        "OTHER_BANK_DB": other,
        "POSTROOM_URL": f"sqlite:///{directory}/queue.db",
        "LEASE": "500ms",
    }
    example = importlib.import_module("examples.bank_transfer.bank")
    _in_a_fork(lambda: _begin(example))
    for number, step in enumerate(STEPS, start=1):  # "": nobody kills the last one
        code = _in_a_fork(functools.partial(_live, example, number, step))
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


def _books(example: Any) -> tuple[int, int, int, int]:
    """What alice and bob have, and how many transfers their banks know of."""
    with example.PAYS.connect() as bank, example.IS_PAID.connect() as other:
        paid = bank.exec_driver_sql("SELECT COUNT(*) FROM transfers").scalar_one()
        seen = other.exec_driver_sql("SELECT COUNT(*) FROM postroom_guards_seen").scalar_one()
    alice, bob = example.balance(example.PAYS, "alice"), example.balance(example.IS_PAID, "bob")
    for engine in (example.PAYS, example.IS_PAID):
        engine.dispose()
    return alice, bob, paid, seen


def _live(example: Any, number: int, step: str) -> None:
    """Make this transfer, and once more all before it: nobody told them whether theirs worked."""

    def at(here: str) -> None:
        if here == step:
            os.kill(os.getpid(), signal.SIGKILL)

    _watch(example, at)

    async def live() -> None:
        async with example.app.lifespan():
            for one in range(1, number + 1):
                await asyncio.to_thread(example.pay, example.Transfer(f"t-{one}", "alice", "bob", CENTS))
            at("paid")
            await asyncio.to_thread(_wait, example, number, step)
            os._exit(0)

    signal.alarm(PATIENCE_S // 2)  # a step that never comes
    asyncio.run(live())


def _watch(example: Any, at: Any) -> None:
    from sqlalchemy import event

    def executed(_c: Any, _cursor: Any, statement: str, *_: Any) -> None:
        for step, text in BY_STATEMENT.items():
            if text in statement:
                at(step)

    for engine in {example.PAYS, example.IS_PAID}:
        event.listen(engine, "after_cursor_execute", executed)
    append, settle = Broker.append, Broker.settle

    async def appending(*args: Any, **kwargs: Any) -> Any:
        found = await append(*args, **kwargs)
        at("appended")
        return found

    async def settling(*args: Any, **kwargs: Any) -> Any:
        at("committed")
        found = await settle(*args, **kwargs)
        at("acked")
        return found

    broker: Any = Broker
    broker.append, broker.settle = appending, settling


def _wait(example: Any, number: int, step: str) -> None:
    """For the death at that step; without one, until all the money has arrived."""
    while step or example.balance(example.IS_PAID, "bob") < number * CENTS:
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


@pytest.mark.timeout(2 * PATIENCE_S)
def test_the_books_balance_whoever_dies(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    with ExitStack() as stack:
        pipes, last = {}, {}
        for kind, banks in _banks(request, tmp_path).items():
            directory = tmp_path / kind
            directory.mkdir()
            pipes[kind] = stack.enter_context(child(lives, str(directory), *banks))[1]
        for number, step in enumerate(STEPS, start=1):
            for kind, pipe in pipes.items():
                told, code, alice, bob, paid, seen = received(pipe, max(1, deadline - time.monotonic()))
                assert (told, code) == (step, -signal.SIGKILL if step else 0), f"{kind} in life {number}"
                assert (START - alice, bob) == (CENTS * paid, CENTS * seen), (kind, step)
                assert number >= paid >= seen, (kind, step)  # the rest is on its way
                last[kind] = (alice, bob)
    assert set(last.values()) == {(START - CENTS * len(STEPS), CENTS * len(STEPS))}
