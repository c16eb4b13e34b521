"""Who takes part. Postroom as a server is what ratios are of; embedded, where there is no server yet."""

from __future__ import annotations

from .kafka import Kafka
from .nats_jetstream import NatsJetStream
from .peer import Peer
from .postroom_peers import PostroomEmbedded, PostroomPushed, PostroomServed
from .rabbitmq import RabbitMQ
from .redis_streams import RedisStreams

__all__ = ["OURS", "PEERS"]

OURS = (
    PostroomServed.name,
    PostroomPushed.name,
    PostroomEmbedded.name,
)  # the first that ran is compared with the others
PEERS: tuple[type[Peer], ...] = (
    PostroomServed,
    PostroomPushed,
    PostroomEmbedded,
    RedisStreams,
    NatsJetStream,
    RabbitMQ,
    Kafka,
)
