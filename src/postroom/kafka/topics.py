"""Topics as Kafka clients see them: an id, and partitions from 0 on, each a chain.

A topic that was made for Kafka clients (`kafka_partitions`) has as many partitions for ever, and can be sent
to. Of any other topic each partition is one under its number, sealed ones too: it can be read, and not sent
to, since only Postroom's own clients know where a key goes after a split.

A topic's id is made from that of the queue and its number, so that every broker says the same. Keeps views of
topics, and never the truth: whoever meets a sealed partition asks for a fresh one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from uuid import UUID

from ..broker.served import Servable
from ..config import DEFAULTS
from ..errors import UnknownTopic
from ..model.policy.bounds import make_room
from ..model.topology.chain import Chain, chains_of, numbered_chains
from ..store.contract import Topic

__all__ = ["KafkaTopic", "Topics"]

_MOST = 20_000  # views that are remembered
_ID_BYTES = 8  # of a topic's number; as many are the queue's


@dataclass(frozen=True, slots=True)
class KafkaTopic:
    topic: Topic
    id: UUID
    chains: tuple[Chain, ...]
    max_batch_bytes: int = DEFAULTS.max_batch_bytes  # that Kafka clients may send
    indexes: tuple[int, ...] = field(init=False)  # of the partitions that are there; all members share it

    def __post_init__(self) -> None:
        there = tuple(chain.index for chain in self.chains if chain.links)
        object.__setattr__(self, "indexes", there)

    @property
    def name(self) -> str:
        return self.topic.name

    @property
    def writable(self) -> bool:
        return self.topic.settings.kafka_partitions > 0

    def chain(self, index: int) -> Chain | None:
        """The partition of that number; None: there is none."""
        return self.chains[index] if 0 <= index < len(self.chains) else None


class Topics:
    """`queue`: the UUID of the queue."""

    def __init__(self, broker: Servable, queue: str) -> None:
        self._broker = broker
        self._queue = UUID(queue).bytes[:_ID_BYTES]
        self._views: dict[str, KafkaTopic] = {}
        self._names: dict[UUID, str] = {}  # of topics, by their ids

    async def view(self, name: str, *, fresh: bool = False) -> KafkaTopic:
        """The topic of that name; `fresh`, as it is now. UnknownTopic if there is none."""
        topic = await self._broker.catalog_topic(name, fresh=fresh)
        known = self._views.get(name)
        if known is not None and (known.topic is topic or known.topic == topic):
            return known
        origins: dict[int, int] = {}
        if topic.settings.kafka_partitions and topic.route.version > 1:
            origins = await self._broker.in_thread(self._broker.store.routes.origins, topic.id)
        return self._seen(topic, origins)

    def _seen(self, topic: Topic, origins: dict[int, int]) -> KafkaTopic:
        fixed = topic.settings.kafka_partitions > 0
        chains = chains_of(topic.route, origins) if fixed else numbered_chains(topic.route)
        view = KafkaTopic(topic, self.id_of(topic), chains, _max_batch_bytes(topic))
        make_room(self._views, _MOST)
        self._views[topic.name] = view
        make_room(self._names, _MOST)
        self._names[view.id] = topic.name
        return view

    async def by_id(self, id: UUID | None) -> KafkaTopic:
        """The topic of that id. UnknownTopic if there is none."""
        if id is not None and id.bytes[:_ID_BYTES] == self._queue:
            known = self._names.get(id)
            if known is not None:
                return await self._same(known, id)
            for topic in await self.all():
                if self.id_of(topic) == id:
                    return await self._same(topic.name, id)
        raise UnknownTopic("there is no topic of that id: ask for the metadata again", topic="")

    async def _same(self, name: str, id: UUID | None) -> KafkaTopic:
        """A topic may be made anew under its name: it is another one then."""
        view = await self.view(name)
        if view.id != id:
            view = await self.view(name, fresh=True)
        if view.id != id:
            raise UnknownTopic("the topic of that id was deleted: ask for the metadata again", topic=name)
        return view

    async def all(self) -> tuple[Topic, ...]:
        """All topics of the queue."""
        return (await self._broker.in_thread(self._broker.listing.look)).topics

    def id_of(self, topic: Topic) -> UUID:
        return UUID(bytes=self._queue + topic.id.to_bytes(_ID_BYTES, "big"))


def _max_batch_bytes(topic: Topic) -> int:
    """What a Kafka client has set, but no more than every queue takes."""
    asked = dict(topic.settings.kafka_configs).get("max.message.bytes", "")
    most = DEFAULTS.max_batch_bytes
    return min(int(asked), most) if asked.isascii() and asked.isdigit() else most
