"""The programs of the contenders: each enqueues jobs that count themselves, or runs them.

    python -m bench.jobs.programs CONTENDER enqueue COUNT
    python -m bench.jobs.programs CONTENDER work        (two of them, or one that starts two processes)

BENCH_URL is the server, BENCH_TALLY the folder where handlers count. A contender's library is imported when
it is asked for. Decides nothing about what is measured: see `run`.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any

__all__ = ["COUNTED", "PROCESSES", "tally"]

COUNTED = struct.Struct("<Qdd")
"""Of a process: how many it handled, when the first and when the last."""
PROCESSES = 2
_ALL_AT_ONCE = 100

_page: list[Any] = []
_counting = threading.Lock()


def tally() -> None:
    """Count one job: the whole work of every handler. Some run in threads, which would lose counts."""
    with _counting:
        _count()


def _count() -> None:
    if not _page or _page[0] != os.getpid():
        path = Path(os.environ["BENCH_TALLY"]) / str(os.getpid())
        path.write_bytes(bytes(COUNTED.size))
        with path.open("r+b") as file:
            _page[:] = [os.getpid(), mmap.mmap(file.fileno(), COUNTED.size), 0, time.time()]
    _page[2] += 1
    COUNTED.pack_into(_page[1], 0, _page[2], _page[3], time.time())


def url() -> str:
    return os.environ["BENCH_URL"]


# ---- Celery ----


def celery_app() -> Any:
    from celery import Celery

    import postroom.integrations.celery  # noqa: F401

    app = Celery("bench", broker=url())
    app.conf.update(
        task_ignore_result=True, worker_prefetch_multiplier=64, broker_transport_options={"migrate": True}
    )
    app.task(name="job")(tally)
    return app


def celery_enqueue(count: int) -> None:
    app = celery_app()
    with app.producer_pool.acquire(block=True) as producer:
        for _ in range(count):
            app.send_task("job", producer=producer)


def celery_work() -> None:
    arguments = ["worker", "-c", str(PROCESSES), "-l", "error", "--without-gossip", "--without-mingle"]
    celery_app().worker_main(arguments)


# ---- Postroom's App ----


def postroom_enqueue(count: int) -> None:
    import postroom.sync

    with postroom.sync.connect(url(), migrate=url().startswith("postgresql")) as mq:
        mq.create_topic("jobs", partitions=PROCESSES)
        mq.create_group("jobs", "workers")
        for _ in range(count):  # a call each, as everywhere here
            mq.send("jobs", b"")


def postroom_work() -> None:
    import postroom

    app = postroom.App(url())

    @app.subscribe("jobs", group="workers", concurrency=_ALL_AT_ONCE)
    async def job(body: bytes) -> None:
        tally()

    app.run()


# ---- dramatiq, arq, Procrastinate ----


def dramatiq_actor() -> Any:
    import dramatiq
    from dramatiq.brokers.redis import RedisBroker

    dramatiq.set_broker(RedisBroker(url=url()))
    return dramatiq.actor(actor_name="job")(tally)


def dramatiq_enqueue(count: int) -> None:
    job = dramatiq_actor()
    for _ in range(count):
        job.send()


def dramatiq_work() -> None:
    import dramatiq

    dramatiq_actor()
    worker = dramatiq.Worker(dramatiq.get_broker(), worker_threads=8)
    worker.start()
    worker.join()
    while True:
        time.sleep(1)


async def _arq_job(context: Any) -> None:
    tally()


def arq_enqueue(count: int) -> None:
    from arq import create_pool
    from arq.connections import RedisSettings

    async def enqueue() -> None:
        pool = await create_pool(RedisSettings.from_dsn(url()))
        for _ in range(count):
            await pool.enqueue_job("_arq_job")

    asyncio.run(enqueue())


def arq_work() -> None:
    from arq import run_worker
    from arq.connections import RedisSettings

    class Settings:
        functions = (_arq_job,)
        redis_settings = RedisSettings.from_dsn(url())
        max_jobs = _ALL_AT_ONCE
        keep_result = 0
        poll_delay = 0.01

    asyncio.set_event_loop(asyncio.new_event_loop())
    run_worker(Settings)


def procrastinate_app() -> Any:
    import procrastinate

    app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=url()))

    async def job() -> None:
        tally()

    app.task(name="job", pass_context=False)(job)
    return app


def procrastinate_enqueue(count: int) -> None:
    async def enqueue() -> None:
        app = procrastinate_app()
        async with app.open_async():
            await app.schema_manager.apply_schema_async()
            for _ in range(count):
                await app.configure_task("job").defer_async()

    asyncio.run(enqueue())


def procrastinate_work() -> None:
    async def work() -> None:
        app = procrastinate_app()
        async with app.open_async():
            await app.run_worker_async(concurrency=_ALL_AT_ONCE, delete_jobs="always", wait=True)

    asyncio.run(work())


if __name__ == "__main__":
    contender, what, *rest = sys.argv[1:]
    globals()[f"{contender}_{what}"](*map(int, rest))
