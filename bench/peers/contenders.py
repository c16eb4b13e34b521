"""Who takes part. Penstock as a server is what ratios are of; embedded, where there is no server yet."""

from __future__ import annotations

from .kafka import Kafka
from .nats_jetstream import NatsJetStream
from .peer import Peer
from .penstock_peers import PenstockEmbedded, PenstockPushed, PenstockServed
from .rabbitmq import RabbitMQ
from .redis_streams import RedisStreams

__all__ = ["OURS", "PEERS"]

OURS = (
    PenstockServed.name,
    PenstockPushed.name,
    PenstockEmbedded.name,
)  # the first that ran is compared with the others
PEERS: tuple[type[Peer], ...] = (
    PenstockServed,
    PenstockPushed,
    PenstockEmbedded,
    RedisStreams,
    NatsJetStream,
    RabbitMQ,
    Kafka,
)
