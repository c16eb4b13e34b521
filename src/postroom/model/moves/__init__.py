"""Plans for moving messages into a log: what is due, what was staged, what an outbox holds."""
