"""Which broker is preferred for a key: the same for everybody, and little moves when one comes or goes (R2).

Rendezvous hashing: each broker has a weight for the key, and the heaviest is the first choice. Those of the
asker's own zone come before all others. Any other choice is as correct; this one makes batches and caches
good.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

__all__ = ["ranked"]


def ranked(key: str, brokers: Iterable[tuple[str, str]], zone: str = "") -> list[str]:
    """Ids of brokers, given as (id, zone), in the order in which they are preferred.

    >>> ranked("orders/2", [("a", "east"), ("b", "west")], zone="west")
    ['b', 'a']
    """
    return [id for id, _ in sorted(brokers, key=lambda one: (one[1] != zone, -_weight(key, one[0]), one[0]))]


def _weight(key: str, id: str) -> int:
    return int.from_bytes(blake2b(f"{id}\0{key}".encode(), digest_size=8).digest())
