"""Whose producer is it? A producer id means something within its principal only (I3, I23).

Ids, epochs and sequences stand in every batch that a consumer is handed: they are no secret. If the id alone
said whose sequence a batch counts in, any consumer that may also send could take a producer's next place, and
the producer's own message would be answered as a repeat, and not stored.

So what a store remembers sequences by is a keyed hash of the principal's name and the id that its client
chose. Two principals never share one, whatever ids they name, and none of them has that of an embedded
producer, or of Postroom's own movers, whose ids are random numbers and count as they are. The key is random,
kept in the store, the same for all brokers of a queue, and shown to nobody: else whoever has seen very many
ids could look for one of its own that meets any of them, for an id has but 63 bits. The batch itself is not
changed: consumers, and a producer that looks for its messages, see the id that was sent.

Why not an owner beside each sequence: that would let whoever comes first keep the owner from a partition
that it has not sent to yet.

Must never depend on a token or on a broker: a principal whose token was rotated, or whose client has gone to
another broker, goes on with its sequences. Whoever may come without a token (`--dev`) is as somebody inside.
"""

from __future__ import annotations

from hashlib import blake2b

__all__ = ["KEY_BYTES", "producer_of"]

KEY_BYTES = 32


def producer_of(key: bytes, principal: str, producer_id: int) -> int:
    """The id under which a principal's producer is remembered: 63 bits, as any other."""
    told = producer_id.to_bytes(8, "big", signed=True) + principal.encode(errors="replace")
    return int.from_bytes(blake2b(told, key=key, digest_size=8).digest(), "big") >> 1
