"""Puts Postroom into the simulator, for good: only in a process of the simulator's own.

Whatever reads a clock, draws a number, starts a thread, opens a file of SQLite or a socket does so in the
world from then on. And makes the files that every world begins with: an empty queue, so that no seed has to
make tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import postroom.client.hosting
import postroom.clock
import postroom.kafka.server as kafka_server
import postroom.store.dialects.sqlite_clock as sqlite_clock
import postroom.store.sql.log.volatile as volatile
import postroom.store.sql.session as session
import postroom.wire.client.remote
import postroom.wire.server.server as server
from postroom.broker.publish import writer
from postroom.client.forward.spool_file import SpoolFile
from postroom.config import DEFAULTS

from . import disk, network, standard
from .loop import run_process
from .plan import DISK, SHARD, SPOOL
from .roles import Notes, connected
from .world import World, current_world, here

__all__ = ["prepared"]


def prepared(folder: Path) -> Path:
    """Install everything; returns the file that worlds begin with. Beside it is an empty spool."""
    (folder / "template").mkdir()
    SpoolFile(folder / "template" / SPOOL).close()
    standard.install()
    standard.steady_hashes()
    disk.install()
    volatile.boot_id = sqlite_clock.boot_id = _boot_id
    session._Mood = standard.FiberMood  # type: ignore[assignment, misc]
    server.listen = kafka_server.listen = network.listen
    postroom.clock.steady_ns = lambda: current_world().now_ns
    # A heuristic: who has nothing to do asks a fifth as often, and a seed takes half the time.
    object.__setattr__(DEFAULTS, "watch_interval_ms", 25)
    object.__setattr__(DEFAULTS.tuning.store, "file_lock_pause_s", 0.004)
    writer._ALONE = 1  # worlds have few messages
    _template(folder / "sharded", {"b": f"sqlite:///{folder / 'sharded' / SHARD}"})
    return _template(folder / "template")


def _boot_id() -> str:
    fiber = here()
    assert fiber is not None, "a process asks"
    machine = fiber.process.machine
    return f"{machine} {current_world().boots.get(machine, 0)}"


def _template(folder: Path, shards: Mapping[str, str] | None = None) -> Path:
    world = World(0)
    world.network = network.Network(world)  # type: ignore[attr-defined]
    one = disk.Disk(world, folder)
    world.disks = {DISK: one}  # type: ignore[attr-defined]

    async def make() -> None:
        mq = await connected(Notes(world, None, shards=shards), f"sqlite:///{one.path}")  # type: ignore[arg-type]
        await mq.close()
        world.finish()

    run_process(world, world.process("maker", DISK), make)
    world.run()
    one.close()  # with the last connection their logs are copied into the files
    return one.path
