"""The store contract, for queues that are served: brokers, who may use them, and how fast.

Exported by `contract`: import them from there. All of it is kept on the first shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..model.access import Permission, Principal
from ..model.flow import Rate
from .values import ServedBroker

__all__ = ["Access", "Brokers", "Rates"]


class Brokers(Protocol):
    """Brokers that are served now (R2). Need not be flushed: each enters itself again and again."""

    def enter(self, id: str, address: str, zone: str, started_at: int, ttl_ms: int) -> None:
        """It lives, for so long at least."""

    def leave(self, id: str) -> None: ...

    def live(self) -> list[ServedBroker]:
        """In the order in which they were started."""


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


class Rates(Protocol):
    """Limits in messages and bytes a second, shared by all who use the store (R40)."""

    def set(self, rate: Rate) -> None:
        """Make or change a limit, flushed; both 0: there is none any more. Bumps the catalog's version."""

    def all(self) -> list[Rate]: ...

    def spend(self, name: str, messages: int, bytes: int) -> int:
        """Take so much of what the rate gives; returns the moment (ms) from which on it may be used.

        It goes into debt rather than refuse (I17). Need not be flushed. A limit that is gone: now.
        """
