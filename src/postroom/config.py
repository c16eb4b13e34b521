"""Every default and every limit, in one place.

Integers are milliseconds and bytes, and the names say so. Friendly units ("10m", timedelta) are turned
into these at the edge by `postroom.units`.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DEFAULTS", "SLOTS", "Limits"]

SLOTS = 1024
"""Slots per topic, for ever (R24, R29)."""


@dataclass(frozen=True, slots=True)
class Limits:
    # what a user may send (R9)
    max_message_bytes: int = 4 * 1024 * 1024  # key, value and headers together
    max_key_bytes: int = 32 * 1024
    max_headers: int = 64
    timestamp_ahead_ms: int = 24 * 3_600_000  # a message's timestamp is ahead of the clock by no more
    max_reason_chars: int = 4000  # of why a message failed; what is longer is cut
    max_batch_messages: int = 10_000
    max_batch_bytes: int = 8 * 1024 * 1024  # a stored batch; always takes one message

    # producer: what is gathered into a batch (R37)
    batch_messages: int = 1000
    batch_bytes: int = 512 * 1024
    in_flight_batches: int = 4  # unresolved batches per partition
    buffer_bytes: int = 32 * 1024 * 1024  # posted and unresolved; beyond it `post` waits
    send_timeout_ms: int = 30_000
    remembered_batches: int = 8  # per producer and partition; more than may be in flight (I3)
    producer_memory_ms: int = 7 * 24 * 3_600_000  # sequences of an idle producer are kept so long

    # spool
    spool_bytes: int = 1024 * 1024 * 1024  # of messages that wait in a spool's file (R31)

    # groups and consumers
    lease_ms: int = 30_000
    max_attempts: int = 16
    window_messages: int = 1000
    window_bytes: int = 16 * 1024 * 1024
    max_handling_ms: int = 3_600_000  # a handler hung for longer is no longer extended (I14)
    poll_wait_ms: int = 30_000  # longest long poll
    member_ttl_factor: int = 2  # a member is live for this many leases after its last heartbeat
    retry_first_ms: int = 1_000
    unnamed_member_ms: int = 600_000  # broadcast: a member without a name is forgotten after so long (R11)
    max_hold_ms: int = 3_600_000  # ordered groups: a failing message holds its key no longer (I10)
    far_retry_ms: int = (
        15 * 60_000
    )  # shared groups: retries further away leave for the group's retry topic (I17)

    # broker
    writer_queue_bytes: int = 64 * 1024 * 1024
    writer_line_bytes: int = 16 * 1024 * 1024  # of that, what one producer may fill (R41)
    commit_bytes: int = 4 * 1024 * 1024  # appends merged into one commit
    commit_batches: int = 256
    tail_cache_bytes: int = 64 * 1024 * 1024
    watch_interval_ms: int = 5  # how often another process's commit is looked for
    watch_cap_ms: int = 100  # longest pause between two looks where the database cannot wake us
    duty_lease_ms: int = 30_000
    schedule_lease_ms: int = 5_000  # delayed messages are late by no more if their mover is killed

    # topics, retention (R44) and backlog (R9)
    backlog_look_ms: int = 200  # the backlog of a topic that has a limit is measured no more often
    partitions: int = 4
    retention_ms: int = 7 * 24 * 3_600_000
    retention_slice_rows: int = 64

    # what jobs stage and publish (I20)
    staged_ms: int = 24 * 3_600_000  # a batch that nobody decided is dropped so long after its last segment
    decision_ms: int = 30 * 24 * 3_600_000  # what was published where is remembered for so long
    query_ms: int = 365 * 24 * 3_600_000  # and so long how far a query is that has more than one batch

    # requests (R38)
    reply_kept_ms: int = 60_000  # a reply that its requester has not read is dropped after so long
    reply_idle_ms: int = 120_000  # the reply topic of a requester not heard of for so long is deleted
    reply_topics: int = 200  # a principal has so many at once, and makes twice as many a minute

    # recurring schedules
    every_late_ms: int = 60_000  # a tick that nobody ran for so long was missed
    every_missed: int = 1000  # of missed ticks, no more are run

    # ids (R32)
    dedup_ids: int = 2_000_000  # remembered per partition at most

    # store
    busy_timeout_ms: int = 10_000
    connect_timeout_ms: int = 5_000
    lock_timeout_ms: int = 5_000  # longest wait for a row's lock on a database server (I15)
    idle_timeout_ms: int = 5_000  # a transaction left open for longer is ended by the server (I15)
    side_lock_ms: int = 5_000  # longest wait for a turn before the database's own lock is asked
    reader_threads: int = 2  # for polls, settling and reads; more of them only fight over the interpreter


DEFAULTS = Limits()
