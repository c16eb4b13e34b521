"""Heartbeats: members stay live, and leases held; blocking, called from the heartbeats' own threads.

Leases are extended at once, members are renewed when it is time (`members`).
A shard that is away costs no lease on the others: what is on it is neither renewed nor lost, and the holder
is told so by empty spans. A member that cannot be renewed, since the first shard is away, keeps its leases.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ...endpoint.values import Beat, Held
from ...errors import GateClosed, GenerationChanged, StoreUnavailable
from ...model.delivery.delivery import Span
from ...store.contract import Store
from ..topology.catalog_cache import CatalogCache
from ..topology.groups import Groups
from .shared import Deliveries

__all__ = ["Beating"]

_log = logging.getLogger("postroom.broker")


class Beating:
    def __init__(self, store: Store, catalog: CatalogCache, groups: Groups, deliveries: Deliveries) -> None:
        self._store = store
        self._catalog = catalog
        self._deliveries = deliveries
        self._groups = groups

    def beat(self, beats: Sequence[Beat]) -> list[tuple[Held, tuple[Span, ...]]]:
        lost: list[tuple[Held, tuple[Span, ...]]] = []
        for beat in beats:
            self._join(beat)
            for held in beat.held:
                gone = self._extend(beat, held)
                if gone is None or gone:
                    lost.append((held, gone or ()))
        return lost

    def _join(self, beat: Beat) -> None:
        try:
            self._groups.members.heard(self._catalog.group(beat.topic, beat.group), beat.member, beat.client)
        except StoreUnavailable as error:
            if "shard" not in error.details:
                raise
            _log.debug("member %s cannot be renewed: %s", beat.member, error)

    def _extend(self, beat: Beat, held: Held) -> tuple[Span, ...] | None:
        """What is lost; None: that cannot be told now."""
        try:
            reader = self._catalog.group(held.topic, beat.group)
            extend = self._store.progress.extend
            return self._deliveries.by_fresh_group(
                reader, lambda known: extend(known, held.partition_id, held.token, held.spans)
            )[1]
        except (GenerationChanged, GateClosed):
            return held.spans
        except StoreUnavailable as error:
            if "shard" not in error.details:
                raise
            return None
