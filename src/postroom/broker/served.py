"""What a server needs of a broker: that of the wire, and that of HTTP.

`Broker` is one, and so is the same broker counted (`metered`). Its operations take one more argument where
the table says so (`Operation.told`): a server adds who asks, and no client says it itself (I23).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ..address import Address
from ..endpoint.endpoint import Endpoint
from ..store.contract import Store
from .access import InThread
from .duties import DutyRunner
from .presence import Presence
from .topology.catalog_cache import Listing

__all__ = ["Servable"]


class Servable(Endpoint, Protocol):
    """An endpoint, and the process that it lives in."""

    @property
    def store(self) -> Store: ...

    @property
    def in_thread(self) -> InThread:
        """Runs blocking work in one of the broker's threads."""

    @property
    def presence(self) -> Presence: ...

    @property
    def duties(self) -> DutyRunner: ...

    @property
    def listing(self) -> Listing: ...

    async def identity_key(self) -> bytes:
        """Returns the key that tells apart the ids of principals' producers."""

    async def add_shards(self, shards: Mapping[str, Address]) -> None:
        """Further databases of the queue, while it is in use. InvalidSetting if one cannot be that shard."""
