"""Every default, every limit and every heuristic, in one place.

`Limits` are promises: what users may rely on. `Tuning` are heuristics that are counted in time: how often
something is checked, how long is waited. With others the queue is a little faster or slower, never
different. Limits carry their tuning, so that whoever is handed limits has both; each room has a part of its
own. A value is read where an object is made, never in the middle of a function, so that a test can have
another one (`tests/tuned.py`). What is no heuristic stays where it is used: factors of units, bounds of a
calendar, numbers of a protocol. `tests/unit/repository/test_tuning.py` finds constants of time elsewhere.

Integers are milliseconds and bytes, and the names say so. Friendly units ("10m", timedelta) are turned
into these at the edge by `postroom.units`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .backoff import Pauses

__all__ = [
    "DEFAULTS",
    "SLOTS",
    "BrokerTuning",
    "CliTuning",
    "ClientTuning",
    "ConsoleTuning",
    "HttpTuning",
    "Limits",
    "SparkTuning",
    "StoreTuning",
    "Tuning",
    "WireTuning",
]

SLOTS = 1024
"""Slots per topic, for ever (R24, R29)."""


@dataclass(frozen=True, slots=True)
class StoreTuning:
    # transactions and connections
    undone_pause_s: float = 0.002  # before a transaction that was undone is run again; doubled each time
    pooled_idle_s: float = 10.0  # a connection that was not used for longer is replaced: it may be dead
    migration_s: int = 3600  # a large table may take its time to be changed

    # the log
    flushed_s: float = 5.0  # a commit that others saw so long ago is on the disk
    ids_check_ms: int = 10_000  # how far groups are, to forget ids they do not need, is asked no more often
    ids_idle_ms: int = 600_000  # a window of ids that nobody used for so long is forgotten
    ids_margin_ms: int = 1_000  # so much more is kept: the clock is read again under the lock

    # progress
    drain_sample_ms: int = 10_000  # how fast a group drains is measured over one to two of these
    first_waits_ms: int = 300_000  # how long messages waited is shown of the last one to two of these
    arrival_ms: int = 60_000  # how fast messages arrive is measured over so long
    due_scan_per_ms: int = 200  # deliveries a millisecond: 20,000 are read ten times a second at most
    clock_slack_ms: int = 1_000  # two readings of one moment may differ by so much

    # the catalog, brokers and duties
    reserved_ms: int = 3_600_000  # whoever has not finished making a topic by then never will
    silent_broker_ms: int = 60_000  # after so long of silence it is removed by the next that says it lives
    longest_duty_ms: int = 120_000  # a lease on a duty that ends later was given by a clock that was put back

    # SQLite
    file_lock_pause_s: float = 0.0005  # between two tries to get the side lock: it is held for about a commit
    wal_pause_s: float = 0.005  # between two tries to open a new file that others are opening too
    wall_check_ms: int = 200  # how often the wall clock is read, to see whether it was set (I26)
    believed_ms: int = 60_000  # a time that is ahead by less is not doubted
    watch_quiet_s: float = 0.04  # others may follow a commit: for so long the file is read, not waited for
    watch_commit_s: float = 0.001  # a commit takes about so long from its first write
    watch_patience_s: float = 1.0  # one wait for a file's events; then it is read in any case
    ballast_seen_s: float = 0.005  # for so long others may append after one process released the ballast
    ballast_check_s: float = 1.0  # how often a process checks whether the ballast can be made
    ballast_again_s: float = 0.5  # how often it checks whether a full disk has room again
    ballast_readers_ms: int = 250  # a checkpoint waits so long for those who read
    checkpoint_wait_s: float = 1.0  # a commit of megabytes waits so long for a copy that it has outrun

    # PostgreSQL and MySQL
    keepalive_idle_s: int = 5  # a connection that is silent for so long is asked whether it lives,
    keepalive_pause_s: int = 2  # three times, so far apart
    listen_s: float = 0.5  # one wait for a notification; whoever stops the watcher ends it
    listen_again_s: float = 0.05  # before a watcher whose connection failed connects again
    listen_anyway_s: float = 2.0  # without news for so long, a poll reads: a notification may be lost
    notify_pause_s: float = 0.005  # between two wake-ups of other processes
    notifier_stop_s: float = 5.0  # the last notifications are given so long to be sent
    end_stuck_s: float = 1.0  # how often the sessions of stopped processes are looked for (I15)
    uptime_ms: int = 2_000  # MySQL tells it in whole seconds: starts that are closer are the same

    # shards
    skew_ms: int = 250  # clocks that agree so far are left alone: that much is lost on the way anyway
    shard_knock_s: tuple[float, ...] = (
        0.05,
        0.1,
        0.2,
        0.5,
        1.0,
    )  # before an unreachable shard is asked again
    watchdog_s: float = 0.5  # how often is checked whether a shard hangs
    shard_slow_s: float = 3.0  # a verb that takes longer makes it ask whether the database answers
    shard_answer_s: float = 2.0  # and that long it waits for an answer


@dataclass(frozen=True, slots=True)
class BrokerTuning:
    # caches
    catalog_fresh_s: float = 1.0  # what other processes changed in the catalog is seen no later
    members_fresh_s: float = 1.0  # and who is in an ordered group,
    members_check_ms: int = 1_000  # which a poll that waits asks again after so long
    slow_sources_fresh_s: float = 0.25  # the store is asked for slow sources no more often

    # polls
    short_poll_ms: int = 1_000  # a poll that waits no longer reads in any case: news of others takes a moment
    acks_wait_ms: int = 20  # acks that may wait for messages wait no longer, whatever their sender says
    poll_failure_s: float = 1.0  # the store failed somebody: the next in the queue tries after so long
    poll_queue_kept_s: float = 60.0  # a queue of polls that nobody has been in for so long is forgotten
    holders_s: float = 0.02  # what other processes hand over is noticed no more often
    just_due_ms: int = 100  # equal moments that are so near may stand for two releases
    due_soon_ms: int = 10_000  # what is due later is found by the next poll
    lull_s: float = 1.0  # nobody waited for so long: the next who waits asks anew
    watcher_failure_s: float = 0.2  # before a watcher whose store failed tries again
    watcher_own_s: float = 0.02  # while only this process commits, others' commits are noticed no later
    watcher_asleep_s: float = 0.25  # meanwhile its own are read so seldom
    watcher_kept_s: float = 30.0  # a watcher that nobody wants is kept for so long
    read_ahead_s: float = 5.0  # what was read ahead and not asked for in so long makes room for others

    # sends
    considerate_s: float = 1.0  # for so long after the last who sent a little, commits stay small (R41)
    commit_quick_s: float = 0.001  # a commit in the event loop that takes longer
    commit_pauses: Pauses = field(default=Pauses(0.01, 1.0))  # sends those that follow it to a thread
    rate_idle_s: float = 1.0  # what was reserved of a rate and not used for so long is given back
    rate_check_s: float = 1.0  # who waits for a rate sees a change of it after so long

    # delayed messages
    schedule_check_ms: int = 1_000  # how often the schedule is read when nothing is due
    # after a failure
    schedule_pauses: Pauses = field(default=Pauses(0.02, 1.0))
    schedule_late_ms: int = 60_000  # no transaction lasts longer: nothing appears that was due before that
    sealed_pause_ms: int = 100  # before a partition that was sealed is asked again
    unreachable_pause_ms: int = 500  # and one on a shard that does not answer
    damaged_row_ms: int = 3_600_000  # a damaged row is read again after so long: somebody may have mended it

    # what jobs publish
    staged_pauses: Pauses = field(
        default=Pauses(0.005, 0.2)
    )  # before a partition that was sealed is planned again
    staged_slice_s: float = 2.0  # one call publishes no longer, and says how far it came
    left_decision_ms: int = 60_000  # a decision that is not published after so long was left: a duty goes on

    # background jobs
    unreadable_run_s: float = 0.2  # batches are checked for no longer in one run
    unreadable_round_s: float = 3600.0  # a round begins no sooner than so long after the one before
    volatile_check_ms: int = 60_000  # how often a volatile log is read that a crash may have emptied
    dead_member_ms: int = 60_000  # a member that died is remembered for so long
    group_used_ms: int = 60_000  # that a group is used is written down no more often
    purge_s: float = 0.5  # how long a purge deletes by itself; the rest is left to retention
    announce_s: float = 5.0  # how often a process says that it uses the queue
    announced_ms: int = 20_000  # and for how long that is believed

    # route changes
    step_tries_s: float = 3.0  # a step that a store refuses is tried so long, then the change is turned back
    step_pause_s: float = 0.02  # between two of these tries
    change_idle_ms: int = 500  # a change that nobody has worked on for so long is anybody's to finish
    change_pauses: Pauses = field(
        default=Pauses(0.005, 0.1)
    )  # before a change that others make is asked for again
    drain_taken_s: float = 0.05  # before partitions are tried again that another change had
    drain_give_up_s: float = 60.0  # a drain without any progress ends

    # groups of Kafka clients
    kafka_offsets_ms: int = 7 * 24 * 3_600_000  # one that nobody uses is forgotten then, as Kafka does

    # tokens
    wrong_token_s: float = 1.0  # how long the answer takes to a wrong token that is one of many


@dataclass(frozen=True, slots=True)
class WireTuning:
    # client
    connect_ms: int = 3_000  # a broker that does not answer a connection by then is unreachable
    unreachable_s: tuple[float, ...] = (0.5, 1.0, 2.0, 5.0, 10.0)  # it is left alone for so long
    closing_s: float = 2.0  # for the answers to what was sent last
    late_s: float = 1.0  # a request that is not answered for so long makes us ask whether the broker lives
    idle_s: float = 5.0  # and so does silence while polls wait
    silence_s: float = 4.0  # it has to answer that within this (docs/PROTOCOL.md)
    brokers_s: float = 15.0  # however much is said, which brokers there are is asked so often
    beat_taken_s: float = (
        0.25  # the loop takes a heartbeat within this, or it is blocked; less than any lease
    )
    beat_answer_s: float = 10.0  # longest wait for the answer to one

    # server
    enter_s: float = 2.0  # how often a broker says that it lives
    entered_ms: int = 7_000  # and for how long that is believed
    tick_s: float = 1.0  # how often connections are checked: silence, slow readers
    least_check_s: float = 0.02  # one that is checked sooner is checked no more often
    refused_s: float = 5.0  # whoever was refused may read why for so long
    handshake_s: float = 10.0  # TLS has to be agreed by then
    no_files_s: float = 0.5  # before somebody is accepted again when there is no file left,
    no_files_told_s: float = 60.0  # and how often that is said
    kafka_idle_s: float = 600.0  # Kafka's own time; its clients close theirs a minute earlier
    kafka_first_members_ms: int = 300  # a group of Kafka clients that was empty waits so long for more
    kafka_shortest_session_ms: int = 1_000  # its members may be silent for as long as they say, within these;
    kafka_longest_session_ms: int = 1_800_000  # Kafka has 6 s, which its clients' own tests do not keep
    kafka_share_beat_ms: int = 5_000  # a consumer of a share group is heard of so often, as Kafka wants it,
    kafka_share_session_ms: int = 45_000  # and gone after so long of silence
    kafka_share_sweep_ms: int = 1_000  # leases that ended are looked for in all sessions no more often: 4,000
    kafka_share_idle_ms: int = 120_000  # its session gives way to another's after so long, if it must
    kafka_shortest_lease_ms: int = 1_000  # that its group may be configured with
    kafka_release_ms: int = 1_000  # what it releases comes again at once, then after this, doubled each time,
    kafka_longest_release_ms: int = 60_000  # up to this
    admit_s: float = 0.004  # for opening a batch on the loop; the rest is done in a thread


@dataclass(frozen=True, slots=True)
class ClientTuning:
    # producer
    ids_fresh_s: float = 1.0  # a change of the topic's window of ids is seen no later
    refused_s: float = 0.5  # for so long a partition that refused gets nothing without a key
    silent_s: float = 1.0  # a try that is not answered for so long: what has no key goes elsewhere,
    silent_kept_s: float = 6.0  # and for so long: a broker needs about five seconds to notice
    back_check_s: float = 0.5  # between two questions whether it is back
    last_try_s: float = 0.05  # with less time left nothing is tried again: its fate would not be known
    one_way_s: float = 3.0  # a one-way batch that lingered past its time is still given this
    usual_timeout_s: float = 3600.0  # a time-out that needs no second look
    answer_s: float = 0.1  # the time of its batches ends with that of the call, and they know more

    # consumer
    start_ahead_ms: int = 10_000  # a start in the future: a clock that is so far ahead is taken for right
    poll_s: int = 30  # how long one poll of an App waits; the next follows at once
    last_settles_s: float = 10.0  # at the end of an App, verdicts are waited for no longer
    leave_s: float = 5.0  # leaving a consumer waits no longer for the store
    acks_wait_ms: int = (
        5  # acks that nobody waits for are stored with the next messages if these come so soon
    )
    hand_out_ms: int = 100  # hand-outs closer than this share an entry
    slow_ahead_ms: int = 20  # so much of the slow lane as is done in that time may be in flight
    slow_saved_ms: int = 1_000  # of handlers' time that the lane did not use: it is not saved up for longer
    slow_report_s: float = 0.1  # slow sources are told to the broker no more often
    give_up_check_s: float = 1.0  # so often it is asked whether ordered partitions are to be given up
    give_up_poll_ms: int = 100  # a poll waits no longer while one is about to be given up
    handed_back_s: float = 0.1  # before a log is asked again for what it did not have
    sealed_s: float = 0.01  # after a seal: the next version of the route is a moment away

    # App
    handler_run_s: float = 0.005  # a handler's loop lets others run after so long
    cancelled_s: float = 5.0  # handlers that were cancelled get so long to end
    queue_told_s: float = 60.0  # between two lines in the log, while a worker waits for its queue
    tick_wait_s: float = 60.0  # then the clock is read again: it may have been moved

    # requests
    keep_s: float = 15.0  # how often the broker is told that the requester lives
    reply_close_s: float = 5.0  # for deleting its topic; else a broker does it by and by
    served_check_s: float = 1.0  # for finding out whether anybody serves a topic
    reply_s: float = 10.0  # a reply waits no longer for a store that does not answer

    # outbox and spool
    route_fresh_s: float = 1.0  # a route is read again after so long
    first_check_s: float = 0.005  # after a message the next is looked for so soon; then less and less often
    line_s: float = 0.25  # a line that takes longer holds up its own topic only
    measure_s: float = 10.0  # between two counts of what waits, for metrics
    relay_stop_s: float = 5.0  # for what is on its way when a relay is stopped
    user_answer_s: int = 30  # longest wait for an answer of the user's own database
    spool_busy_s: float = 10.0  # for another process that has the spool's file
    spool_again_s: float = 1.0  # before a file that could not be emptied is read again
    spool_stop_s: float = 5.0  # what lands last is given so long to be forwarded, while nothing is in the way
    spool_check_s: float = 0.05  # between two questions whether something is in the way
    spool_told_s: float = 60.0  # between two lines in the log, while messages wait

    # users' tests
    test_check_s: float = 0.005  # while a handler is at work, others may get something to do

    # log records as messages
    logs_linger_s: float = 0.2  # records wait so long for others, to leave together
    logs_flush_s: float = 5.0  # at the end of a program, they are waited for no longer

    # the blocking SDK
    interrupted_s: float = 10.0  # an interrupted call gets so long to end

    # Celery
    prefetch_gather_s: float = 0.005  # a worker that has room for few messages asks for more so much later
    reply_idle_s: float = 60.0  # a queue for replies or events that nobody reads is kept for so long at least
    reply_queue_ms: int = 3_600_000  # a topic for replies that nobody has read for so long is deleted


@dataclass(frozen=True, slots=True)
class HttpTuning:
    headers_s: float = 10.0  # the head of a request has to be there by then
    idle_s: int = 30  # between two requests of a connection
    ready_answer_s: float = 2.0  # a store that does not answer /ready by then is not ready
    ready_fresh_s: float = 1.0  # what it said is repeated for so long
    full_s: float = 10.0  # after a full disk it is asked again
    ready_lease_ms: int = 1  # so short that it is free for the next broker that writes
    sample_fresh_s: float = 5.0  # the store is measured for metrics no more often
    sample_work_s: float = 2.0  # one measurement takes no longer; what is missing is said
    sample_wait_s: float = 3.0  # a scrape waits no longer for one


@dataclass(frozen=True, slots=True)
class ConsoleTuning:
    sample_s: float = 2.0  # how often the queue is measured while somebody views it,
    quiet_sample_s: float = 10.0  # and while nobody does: for the charts
    chart_step_s: float = 10.0  # between two points of a chart
    detail_s: float = 0.2  # of a measurement, for ages and stopped keys of the groups that are worst
    stream_s: float = 60.0  # a stream of figures ends, and the page asks for the next: who it is is checked
    stop_check_s: float = 0.5  # so often a stream checks whether the broker is stopping
    session_s: float = 12 * 3600.0  # a log-in that is not used for so long ends
    login_s: float = 5.0  # the body of a log-in has to be there by then
    search_s: float = 2.0  # a search for a key ends, and says how far it came
    count_s: float = 0.3  # so does what counts dead letters by their error: the page waits for it


@dataclass(frozen=True, slots=True)
class SparkTuning:
    told_s: float = 1.0  # a group learns no more often how far the stream is
    wait_told_s: float = 1.0  # a wait for the queue that is longer is worth a line,
    wait_pause_s: float = 2.0  # and from then on there is no hurry
    registry_s: float = 10.0  # one request to a schema registry
    registry_pauses_s: tuple[float, ...] = (0.2, 1.0, 3.0)  # between its tries
    registry_again_s: float = 10.0  # before a schema is asked for again that was not there
    java_s: float = 60.0  # for `java -version`


@dataclass(frozen=True, slots=True)
class CliTuning:
    # commands
    complete_s: float = 1.0  # a shell that completes a name waits no longer for a queue that is served
    consume_poll_s: float = 30.0  # one poll of `postroom consume`; the next follows at once
    drain_check_s: float = 0.2  # between two lines about a drain in its first phase,
    drained_check_s: float = 1.0  # and in its second
    route_wait_s: float = 20.0  # a change that somebody else makes is waited for no longer,
    route_check_s: float = 0.1  # and asked for so often
    process_answer_s: float = 5.0  # a process of a worker that does not answer by then is not ready
    reload_check_s: float = 0.3  # how often `postroom worker --reload` checks files

    # what `postroom doctor` finds worth a line
    old_transaction_ms: int = 60_000
    idle_group_ms: int = 24 * 3_600_000
    old_outbox_ms: int = 60_000
    broker_clock_ms: int = 5_000  # clocks that differ by more confuse people who read times
    broker_answer_ms: int = 5_000
    slow_trip_ms: float = 5.0
    slow_commit_ms: float = 20.0
    server_clock_ms: int = 1_000
    test_lease_ms: int = 5_000
    slow_flush_ms: float = 20.0
    future_ms: int = 60_000  # a last message that is further ahead was written by a wrong clock
    wal_written_s: float = 0.2  # somebody may be writing a file's end just now

    # `postroom demo`
    demo_pause_s: float = 0.01  # of a sender, between two lists
    demo_line_s: float = 1.0  # between two lines of a scene
    demo_check_s: float = 0.1  # between two questions whether something is there,
    demo_patience_s: float = 60.0  # which an act waits for no longer
    demo_last_s: float = 0.2  # for one message more, which should not come
    demo_stop_s: float = 10.0  # an actor that does not end by then is killed


@dataclass(frozen=True, slots=True)
class Tuning:
    store: StoreTuning = field(default_factory=StoreTuning)
    broker: BrokerTuning = field(default_factory=BrokerTuning)
    wire: WireTuning = field(default_factory=WireTuning)
    client: ClientTuning = field(default_factory=ClientTuning)
    http: HttpTuning = field(default_factory=HttpTuning)
    console: ConsoleTuning = field(default_factory=ConsoleTuning)
    spark: SparkTuning = field(default_factory=SparkTuning)
    cli: CliTuning = field(default_factory=CliTuning)


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
    longest_lease_ms: int = 24 * 3_600_000  # what its holder keeps is out of reach for so long
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
    access_fresh_ms: int = 2_000  # a token that was removed, rotated or lost a permission is used no longer
    schedule_lease_ms: int = 5_000  # delayed messages are late by no more if their mover is killed

    # topics, retention (R44) and backlog (R9)
    backlog_look_ms: int = 200  # the backlog of a topic that has a limit is measured no more often
    partitions: int = 4
    retention_ms: int = 7 * 24 * 3_600_000
    retention_slice_rows: int = 64

    # the audit log
    audit_entries: int = 10_000  # administrative actions that are remembered; the oldest make room
    audit_ms: int = 365 * 24 * 3_600_000  # and no longer than this

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
    shortest_every_ms: int = 1_000
    every_missed: int = 1000  # of missed ticks, no more are run

    # HTTP
    http_send_ms: int = 10_000  # a send waits so long to be stored, if it does not say

    # Spark
    spark_wait_ms: int = 60_000  # brokers or databases that cannot be reached are waited for

    # ids (R32)
    dedup_ids: int = 2_000_000  # remembered per partition at most

    # store
    busy_timeout_ms: int = 10_000
    connect_timeout_ms: int = 5_000
    lock_timeout_ms: int = 5_000  # longest wait for a row's lock on a database server (I15)
    idle_timeout_ms: int = 5_000  # a transaction left open for longer is ended by the server (I15)
    side_lock_ms: int = 5_000  # longest wait for a turn before the database's own lock is asked
    reader_threads: int = 2  # for polls, settling and reads; more of them only fight over the interpreter

    # heuristics: no promise to anybody, and handed on with the promises
    tuning: Tuning = field(default_factory=Tuning, repr=False)


DEFAULTS = Limits()
