"""Celery's workers on Postroom: real processes, on a file, at a broker and on PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import postroom.sync

from .shops import Shop, kill, until

SLOW = pytest.mark.slow("starts Celery's workers at each place")


@pytest.fixture(params=["sqlite", pytest.param("broker", marks=SLOW), pytest.param("postgresql", marks=SLOW)])
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shop]:
    options = {"lease": 3}
    file = f"sqlite:///{tmp_path}/queue.db"
    if request.param == "sqlite":
        shop = Shop(tmp_path, f"postroom+{file}", options)
        shop.write_app()
        yield shop
    elif request.param == "broker":
        with postroom.sync.connect(file) as mq, mq.serve("127.0.0.1", 0, token="secret") as served:
            shop = Shop(tmp_path, served.url, {**options, "token": "secret"})
            shop.write_app()
            yield shop
    else:
        url = request.getfixturevalue("postgres_url")
        shop = Shop(tmp_path, f"postroom+{url}", {**options, "migrate": True})
        shop.write_app()
        yield shop


@pytest.mark.slow("starts Celery's worker, which tries again after seconds")
def test_tasks_run_are_retried_chained_and_answered(shop: Shop) -> None:
    with shop.worker("-c", "2"):
        told = shop.run("""
            from celery import chain
            print(add.delay(1, 2).get(timeout=60))
            sums = [add.delay(n, n) for n in range(20)]
            print([one.get(timeout=60) for one in sums] == list(range(0, 40, 2)))
            print(flaky.delay().get(timeout=60))
            print(chain(add.s(1, 1), add.s(3))().get(timeout=60))
            nested.delay(5).get(timeout=60)
            print(app.control.ping(timeout=20, limit=1))
        """)
        until(lambda: {f"nested {n}" for n in range(5)} <= set(shop.notes()))
    assert told.splitlines() == ["3", "True", "2", "5", "[{'one@here': {'ok': 'pong'}}]"]
    assert [line for line in shop.notes() if "try" in line] == ["try 0", "try 1", "try 2"]


@pytest.mark.slow("starts Celery's workers")
def test_a_task_of_a_killed_worker_runs_again_and_none_is_lost(shop: Shop) -> None:
    shop.run("""
        late.delay("a", "go")
        for n in range(20): write.delay(f"line {n}")
    """)
    with shop.worker("-c", "1", "--prefetch-multiplier", "4") as first:
        until(lambda: "begins a" in shop.notes())
        kill(first)
    (shop.folder / "go").touch()
    with shop.worker("-c", "1", name="two"):
        until(lambda: "ends a" in shop.notes())
        until(lambda: {f"line {n}" for n in range(20)} <= set(shop.notes()))
    assert shop.notes().count("begins a") == 2
    assert shop.notes().count("ends a") == 1


@pytest.mark.slow("waits for several leases")
@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_a_task_longer_than_its_lease_runs_once(shop: Shop, pool: str) -> None:
    shop.options["lease"] = 6  # a busy machine may keep a process from renewing it for some seconds
    one = ("-c", "1", "--prefetch-multiplier", "1", "-P")
    with shop.worker(*one, pool), shop.worker(*one, pool, name="two"):
        shop.run("late.delay('a', 'go')")
        until(lambda: "begins a" in shop.notes())
        shop.run("write.apply_async(('after',), countdown=13)")
        until(lambda: "after" in shop.notes())  # more than two leases later, by the worker that is free
        (shop.folder / "go").touch()
        until(lambda: "ends a" in shop.notes())
    assert shop.notes().count("begins a") == 1


@pytest.mark.slow("starts and stops workers")
def test_far_tasks_wait_in_the_schedule_and_not_in_a_worker(shop: Shop) -> None:
    with shop.worker("-c", "1", "--prefetch-multiplier", "1"):
        told = shop.run("""
            for n in range(50): write.apply_async((f"far {n}",), countdown=3600)
            write.apply_async(("soon",), countdown=0.5)
            write.delay("now")
            print(app.control.inspect(timeout=20, limit=1).scheduled())
        """)
        until(lambda: shop.notes() == ["now", "soon"])
        assert told.strip() == "{'one@here': []}"
        url = shop.broker.removeprefix("postroom+")
        with postroom.sync.connect(url, token=shop.options.get("token")) as mq:
            until(lambda: mq.lag("celery", "celery").total.messages == 0)  # Celery acks what has begun
            assert mq.topic("celery").delayed == 50


@pytest.mark.slow("starts and stops workers")
def test_a_task_that_was_revoked_does_not_run(shop: Shop) -> None:
    with shop.worker("-c", "1"):
        shop.run("""
            task = write.apply_async(("never",), countdown=1)
            app.control.revoke(task.id, reply=True, timeout=20, limit=1)
            write.apply_async(("later",), countdown=2)
        """)
        until(lambda: "later" in shop.notes())
    assert shop.notes() == ["later"]


@pytest.mark.slow("starts Celery's workers")
def test_a_rejected_task_is_a_dead_letter(shop: Shop) -> None:
    with shop.worker("-c", "1"):
        shop.run("refused.delay()")
        url = shop.broker.removeprefix("postroom+")
        with postroom.sync.connect(url, token=shop.options.get("token")) as mq:
            until(lambda: mq.topics() and mq.dead_letters("celery", "celery"))
            (letter,) = mq.dead_letters("celery", "celery")
            assert "rejected" in letter.reason


@pytest.mark.slow("starts and stops workers")
def test_a_worker_that_stops_hands_back_what_it_has_not_begun(shop: Shop) -> None:
    shop.options["lease"] = 60  # nobody waits for its end
    shop.run("""
        late.delay("a", "go")
        for n in range(5): write.delay(f"line {n}")
    """)
    with shop.worker("-c", "1", "--prefetch-multiplier", "4") as first:
        until(lambda: "begins a" in shop.notes())
        first.terminate()
        (shop.folder / "go").touch()
        first.wait()
    with shop.worker("-c", "1", name="two"):
        until(lambda: {f"line {n}" for n in range(5)} <= set(shop.notes()))
    assert shop.notes().count("begins a") == 1
    assert sorted(shop.notes()) == sorted(["begins a", "ends a", *(f"line {n}" for n in range(5))])


@pytest.mark.slow("many children, one after the other")
def test_children_that_were_forked_late_publish_and_lose_nothing(tmp_path: Path) -> None:
    """The parent has the file open by then: SQLite would lose what they commit (see `link`)."""
    shop = Shop(tmp_path, f"postroom+sqlite:///{tmp_path}/queue.db", {})
    shop.write_app()
    with shop.worker("-c", "2", "--max-tasks-per-child", "1", name="one"):
        shop.run("for n in range(6): nested.delay(3)")
        until(lambda: len(shop.notes()) >= 18)
    assert sorted(set(shop.notes())) == ["nested 0", "nested 1", "nested 2"]
    assert len(shop.notes()) == 18
