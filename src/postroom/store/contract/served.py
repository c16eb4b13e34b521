"""The store contract, for queues that are served: brokers, who may use them, and how fast.

Exported by `contract`: import them from there. All of it is kept on the first shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ...model.access import Permission, Principal
from ...model.policy.rate import Rate
from ...model.policy.slow_lane import LaneState, Seen
from .values import Group, Process, ServedBroker

__all__ = ["Access", "Brokers", "Lanes", "Rates"]


class Brokers(Protocol):
    """Brokers that are served now (R2), and all processes that use the store, whether they serve or not.

    Need not be flushed: each enters itself again and again.
    """

    def enter(self, id: str, address: str, zone: str, started_at: int, ttl_ms: int) -> None:
        """Announce a broker: it lives for so long at least."""

    def leave(self, id: str) -> None: ...

    def live(self) -> list[ServedBroker]:
        """In the order in which they were started."""

    def queue(self) -> str:
        """The UUID of the queue that they serve: no other has it."""

    def announce(self, process: Process, ttl_ms: int) -> None:
        """A process uses the store, for so long at least, and can reach these shards."""

    def withdraw(self, id: str) -> None:
        """Forget a process, which uses the store no more."""

    def announced(self) -> list[Process]:
        """Return the processes that use the store now, by name."""


class Access(Protocol):
    """Principals, each with the hash of a secret, or without one (""): R48. Every change is flushed."""

    def add(self, principal: Principal, secret_hash: str) -> Principal:
        """PrincipalExists if there is one of that name: of two who make it at once, one does."""

    def put(self, principal: Principal, secret_hash: str | None) -> None:
        """Make a principal, or change its permissions; None: its secret stays (UnknownPrincipal if new)."""

    def permit(self, name: str, grant: Sequence[Permission], revoke: Sequence[Permission]) -> Principal:
        """Change some of its permissions and leave the others. UnknownPrincipal if there is none."""

    def remove(self, name: str) -> bool: ...

    def by_secret(self, secret_hash: str) -> Principal | None: ...

    def by_name(self, name: str) -> Principal | None: ...

    def principals(self) -> list[Principal]:
        """By name."""

    def key(self) -> bytes:
        """A random secret of the queue, made when it is first asked for and never changed (I23)."""


class Rates(Protocol):
    """Limits in messages and bytes a second, shared by all who use the store (R40).

    What is spent of them need not survive. Of a limit that is changed nothing is spent. With a topic or a
    group its limits are deleted. `model.flow` decides.
    """

    def set(self, rate: Rate) -> None:
        """Make or change a limit, flushed; both 0: there is none any more. Bumps the catalog's version.

        UnknownTopic or UnknownGroup if what it is about is not there.
        """

    def all(self) -> list[Rate]:
        """By name."""

    def spend(
        self, rate: Rate, messages: int, bytes: int, *, owed_messages: int = 0, owed_bytes: int = 0
    ) -> int:
        """Take so much of what the rate gives; returns the moment (ms) from which on it may be used.

        It goes into debt rather than refuse (I17). What is owed was used before, and is counted first.
        `rate` is what the caller knows: it is not looked up.
        """

    def give_back(self, rate: Rate, messages: int, bytes: int) -> None:
        """Taken and not used; less than 0: used and not taken."""

    def debts(self) -> dict[str, int]:
        """By name, how many milliseconds whoever comes now has to wait; those that are open are missing.

        Of a broadcast group, the member that waits longest.
        """


class Lanes(Protocol):
    """Counts of what became of each source's messages, and which sources are slow (R42). Need not survive.

    With a group they are forgotten (`Progress.forget`). `model.lanes` decides.
    """

    def count(self, group: Group, counts: Sequence[tuple[int, Seen]]) -> LaneState:
        """Add what was counted, each at its moment, and decide by the group's policy. Nothing: only decide.

        What is older than the window is not counted. Beyond `MOST_SOURCES`, further sources are left out.
        """

    def state(self, group: Group) -> LaneState:
        """One cheap read."""
