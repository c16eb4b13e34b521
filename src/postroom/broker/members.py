"""Who is live: members enter at once, and are renewed together.

A member beats three times a lease and is live for two: most beats change nothing. One that is due to be
renewed takes along all that were heard since they were renewed, in one transaction, so that thousands of
idle members cost a few transactions each lease. In ordered groups each beat counts, since partitions are
shared among members heard of within a lease. Must never bring back a member that left: who is not there is
entered by its own next beat only. Blocking, called from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..config import Limits
from ..store.contract import Group, Store

__all__ = ["Members"]

_FEW = 1000
_TOGETHER = 500  # renewed in one transaction
_NEVER = -(2**62)

_Who = tuple[int, str]


@dataclass(slots=True)
class _Known:
    group: Group
    heard: int = _NEVER
    renewed: int = _NEVER

    @property
    def due_ms(self) -> int:
        """A beat renews it after so long."""
        lease = self.group.settings.lease_ms
        return lease // 4 if self.group.settings.mode == "ordered" else lease * 3 // 4

    def is_older(self, now: int, ms: int) -> bool:
        return abs(now - self.renewed) >= ms


class Members:
    """`used` is told of groups that have live members, as often as they are renewed."""

    def __init__(self, store: Store, limits: Limits, used: Callable[[Group], None]) -> None:
        self._store, self._limits, self._used = store, limits, used
        self._lock = threading.Lock()
        self._known: dict[_Who, _Known] = {}
        self._crowded = _FEW  # so many are known: time to forget those that are silent

    def enter(self, group: Group, member: str, client: str) -> None:
        """Or renew it, now."""
        now = self._store.now_ms()
        self._store.progress.join(group.id, member, client, self._ttl_ms(group))
        with self._lock:
            if len(self._known) >= self._crowded:  # members that died here, and nobody beats any more
                self._forget_silent(now)
                self._crowded = max(_FEW, 2 * len(self._known))
            self._known[group.id, member] = _Known(group, now, now)
        self._used(group)

    def leave(self, group: Group, member: str) -> None:
        with self._lock:
            self._known.pop((group.id, member), None)
        self._store.progress.leave(group.id, member)

    def heard(self, group: Group, member: str, client: str) -> None:
        """A member has beaten."""
        who, now = (group.id, member), self._store.now_ms()
        with self._lock:
            known = self._known.get(who)
            if known is not None and not known.is_older(now, self._ttl_ms(group)):
                known.group, known.heard = group, now
                if not known.is_older(now, known.due_ms):
                    return
                due = self._due(now)
            else:
                due = {}
        if not due or who in self._renew(due, now):
            self.enter(group, member, client)

    def _ttl_ms(self, group: Group) -> int:
        return self._limits.member_ttl_factor * group.settings.lease_ms

    def _due(self, now: int) -> dict[_Who, int]:
        """Those to be renewed, and when they were before; they count as renewed from here on."""
        due: dict[_Who, int] = {}
        for who, known in list(self._known.items()):
            if known.heard > known.renewed and known.is_older(now, known.due_ms // 2):
                due[who], known.renewed = known.renewed, now
            elif known.is_older(now, 2 * self._ttl_ms(known.group)):
                del self._known[who]  # nobody has heard of it for long
        return due

    def _forget_silent(self, now: int) -> None:
        for who, known in list(self._known.items()):
            if known.is_older(now, 2 * self._ttl_ms(known.group)):
                del self._known[who]

    def _renew(self, due: dict[_Who, int], now: int) -> set[_Who]:
        """Returns who is not there any more."""
        missing: set[_Who] = set()
        try:
            for some in _parts(sorted(due)):
                missing.update(self._store.progress.renew_each(self._until(some, now)))
        except BaseException:
            self._restore(due)
            raise
        self._restore(dict.fromkeys(missing, _NEVER))
        with self._lock:
            groups = {who[0]: self._known[who].group for who in due if who in self._known}
        for group in groups.values():
            self._used(group)
        return missing

    def _until(self, some: list[_Who], now: int) -> list[tuple[int, str, int]]:
        """From when they were heard."""
        with self._lock:
            known = [(who, self._known[who]) for who in some if who in self._known]
        return [(*who, self._ttl_ms(one.group) - max(0, now - one.heard)) for who, one in known]

    def _restore(self, renewed: dict[_Who, int]) -> None:
        with self._lock:
            for who, moment in renewed.items():
                if who in self._known:
                    self._known[who].renewed = moment


def _parts(items: list[_Who]) -> Iterator[list[_Who]]:
    for at in range(0, len(items), _TOGETHER):
        yield items[at : at + _TOGETHER]
