"""Messages of slow sources are set aside: moved to the group's lane before they are tried (R42).

Decides where they go, and which of them go together: many small ranges of one settling have one stamp, and so
one append and one settling in the end, however many they are (I12). A message that cannot be set aside, since
the policy is gone or it is in the lane already, is released: somebody tries it.
"""

from __future__ import annotations

import secrets
from dataclasses import replace

from ..model.delivery import MOVED_TOGETHER, Kind, Settlement, Stamp
from ..model.names import owner, slow_topic
from ..model.settings import Start
from ..store.contract import Group, Topic
from .catalog import CatalogCache
from .endpoint import Verdict

__all__ = ["SettingAside", "leads_to_lane"]


class SettingAside:
    """Of one part that is settled. Blocking."""

    def __init__(self, catalog: CatalogCache, group: Group) -> None:
        self._catalog, self._group = catalog, group
        self._stamp: Stamp | None = None
        self._messages = 0

    def settlement(self, verdict: Verdict) -> Settlement:
        messages = verdict.last - verdict.first + 1
        if self._stamp is None or self._messages + messages > MOVED_TOGETHER:
            target = self._target()
            if target is None:
                return Settlement(Kind.RELEASE, verdict.first, verdict.last)
            self._stamp = Stamp(secrets.randbits(62), target.route.ranges[0].partition_id)
            self._messages = 0
        self._messages += messages
        return Settlement(Kind.LANE, verdict.first, verdict.last, stamp=self._stamp)

    def _target(self) -> Topic | None:
        topic, name = _base(self._group)
        group = self._catalog.group(topic, name)
        if not group.settings.slow_lane.on or self._group.topic == slow_topic(topic, name):
            return None
        lane = self._catalog.lane(topic, name)
        return make_lane(self._catalog, group) if lane is None else lane[0]


def make_lane(catalog: CatalogCache, group: Group) -> Topic:
    """The group's lane and the group that reads it, with the settings of the group itself."""
    fresh = replace(group.settings, start=Start(), expires_ms=0)
    return catalog.make_internal(slow_topic(group.topic, group.name), group.name, fresh)


def leads_to_lane(catalog: CatalogCache, group: Group, partition_id: int) -> bool:
    """Whether what is stamped for that partition goes to the group's lane. Blocking."""
    lane = catalog.lane(*_base(group))
    return lane is not None and any(p.partition_id == partition_id for p in lane[0].route.partitions)


def _base(group: Group) -> tuple[str, str]:
    """The topic and the group that this is about: it may be one of the group's own topics."""
    return owner(group.topic) or (group.topic, group.name)
