"""A disk that is slow: the kernel lets some processes write only so often (cgroup, version 1 or 2).

Needs root, and a file system on a disk: nothing is slow in memory. Where that is not so, `of` returns None,
and the way to the database is slowed instead.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

__all__ = ["SlowDisk"]

_OLD, _NEW = Path("/sys/fs/cgroup/blkio"), Path("/sys/fs/cgroup")


class SlowDisk:
    def __init__(self, parent: Path, device: str) -> None:
        self._parent, self._device = parent, device
        self._group = parent / f"postroom-storm-{os.getpid()}"

    @classmethod
    def of(cls, folder: Path) -> SlowDisk | None:
        """The disk of that folder, if it can be slowed."""
        device = _device(folder)
        parent = _OLD if _OLD.exists() else _NEW
        if device is None or os.geteuid() != 0 or not (parent / "cgroup.procs").exists():
            return None
        slow = cls(parent, device)
        try:
            slow.hold([], writes=1000)
        except OSError:
            return None
        finally:
            slow.release()
        return slow

    def hold(self, pids: Iterable[int], *, writes: int) -> None:
        """These processes write so often in a second at most, together, until they are released."""
        self._group.mkdir(exist_ok=True)
        if (limit := self._group / "blkio.throttle.write_iops_device").exists():
            limit.write_text(f"{self._device} {writes}")
        else:
            (self._group / "io.max").write_text(f"{self._device} wiops={writes}")
        _put(self._group, pids)

    def release(self) -> None:
        """May be called twice."""
        if self._group.exists():
            _put(self._parent, map(int, (self._group / "cgroup.procs").read_text().split()))
            self._group.rmdir()


def _put(group: Path, pids: Iterable[int]) -> None:
    for pid in pids:
        try:
            (group / "cgroup.procs").write_text(str(pid))
        except ProcessLookupError:
            pass  # it has ended meanwhile


def _device(folder: Path) -> str | None:
    """The whole disk: a partition of it cannot be slowed."""
    number = folder.stat().st_dev
    known = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not known.exists():
        return None
    disk = known.resolve()
    return ((disk.parent if (disk / "partition").exists() else disk) / "dev").read_text().strip()
