// What to do about an alert. Written by tools/docs/runbooks.py from docs/howto/runbooks.md.

export const RUNBOOKS = {
 "PostroomBrokerDown": [
  "Clients use the other brokers; with only one, nothing is sent or read, and nothing is lost.",
  "Look at its process and the end of its log: systemctl status postroom, or the container's state.",
  "postroom doctor with the broker's database says whether that is the cause. Start the broker again."
 ],
 "PostroomGroupLate": [
  "The oldest message waits for more than 5 minutes.",
  "On the group's page see whether anybody reads it, whether it is paused, and whether one partition alone is behind.",
  "All are behind: start more consumers, or raise concurrency. One is: a hot key, or a partition to split.",
  "Messages are in hand and not settled: handlers hang or fail. Their log says why."
 ],
 "PostroomFirstReadLate": [
  "1 of 20 messages waits for more than a minute until somebody reads it first, while the backlog may still be short.",
  "Start more consumers, or raise concurrency; look at the time that a handler takes.",
  "If only some sources are slow, give the group a slow lane."
 ],
 "PostroomHandlersFailing": [
  "A worker fails 1 of 10 messages.",
  "The worker's log has the error, the message's place and the attempt. postroom dead list TOPIC GROUP --by-error counts what was given up.",
  "Mend the handler or what it calls; while that takes long, pause the group: nothing is lost."
 ],
 "PostroomHandlersStopped": [
  "Handlers of a worker do not run.",
  "/readyz of the worker says what it waits for: the queue, a topic that is not there, a permission.",
  "Its log says the same with the command that mends it."
 ],
 "PostroomGroupLagGrowing": [
  "For 15 minutes more has arrived than was settled.",
  "See on the topic's page whether more is sent than usual, or less is settled.",
  "More is sent: start more consumers, or set a rate limit on the producer. Less is settled: as in PostroomGroupLate."
 ],
 "PostroomGroupAbandoned": [
  "Messages wait, and the group has no members.",
  "Start its consumers. A group that is paused has members and is not meant here.",
  "If nobody needs the group, delete it: it holds its messages for ever. A mistyped group name makes one."
 ],
 "PostroomDeadLettersGrowing": [
  "A group gives up messages.",
  "See the errors and tracebacks on the page of its dead letters, or with postroom dead list TOPIC GROUP --by-error.",
  "Mend the cause, redrive one letter, and see that it is handled; then redrive all.",
  "Discard only what nobody will ever need: it cannot be taken back."
 ],
 "PostroomUnreadableBatches": [
  "Stored batches cannot be read: their bytes have changed.",
  "Check the disk and its controller. postroom doctor --deep reads everything and lists the damage.",
  "The bytes are among the dead letters of each group. If much is damaged, restore a backup."
 ],
 "PostroomKeysStopped": [
  "Keys of an ordered group wait for people, with all that is behind them.",
  "See why on the page of stopped keys, or with postroom stopped list TOPIC GROUP.",
  "Mend the cause and restart the key. What cannot be mended: skip it (to the dead letters) or drop it."
 ],
 "PostroomStoreErrors": [
  "The database is away, busy or broken; senders wait and try again.",
  "See the database's own monitoring and log. postroom doctor says what it finds from here.",
  "store_busy alone: somebody holds locks for long, such as a migration or a backup of another program."
 ],
 "PostroomDiskFull": [
  "The database has no space left, and nothing is stored.",
  "Make room, or purge or delete a topic that may go; a SQLite queue keeps a reserve for that.",
  "Lower retention or retention_bytes where too much is kept; it works within minutes."
 ],
 "PostroomCommitsSlow": [
  "1 of 100 commits takes more than half a second.",
  "Look at the disk's latency, and for others on that machine or database.",
  "On a server see that its log is on a fast disk; with shards, move hot partitions to another."
 ],
 "PostroomNoDutyHolder": [
  "No broker does the background work: old messages stay, delayed ones may be late.",
  "The brokers' logs say why each fails at it. postroom doctor checks the leases and the clock.",
  "Restart one broker; if it fails again, see PostroomStoreErrors."
 ],
 "PostroomProducersThrottled": [
  "Senders wait for more than 5 seconds for a rate limit.",
  "See under rates and limits which one it is, and in the audit log who set it.",
  "Raise it if the queue and its readers can take more; else tell the senders."
 ],
 "PostroomBacklogFull": [
  "A topic refuses messages, since its slowest group is max_backlog behind.",
  "Mend that group, as in PostroomGroupLate. If it is abandoned, delete it.",
  "Raise max_backlog only if there is room for what comes."
 ],
 "PostroomConnectionsNearLimit": [
  "A broker has more than 80 % of the connections that it may have.",
  "See in its log who connects. A program that connects for each message is to keep its connection.",
  "Run another broker, or raise max_connections."
 ],
 "PostroomFiguresIncomplete": [
  "Figures of some groups are missing or old, so that other alerts do not see everything.",
  "More than 200 groups: take the rest from postroom status --json. A slow store: see PostroomCommitsSlow."
 ],
 "PostroomSomethingDestroyed": [
  "A topic or group was deleted, a topic purged, or dead letters discarded. It may well have been meant.",
  "See who it was, from where, and what was there before: the audit log in the console, or postroom audit-log --since 1h.",
  "If nobody meant it: take the permission away (postroom access revoke), and see the backup."
 ],
 "PostroomLogInsRefused": [
  "Many requests over HTTP came without a valid token: the console, or a program.",
  "The broker's log has the addresses. A program with a token that was rotated gets its new one.",
  "Somebody who tries tokens is slowed down by itself; close the port to where it comes from."
 ]
};
