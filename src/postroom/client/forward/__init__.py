"""Messages that wait on the user's side until the queue has them: outbox (R30) and spool (R31)."""
