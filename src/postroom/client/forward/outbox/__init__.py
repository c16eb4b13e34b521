"""Messages that are written in the caller's own transaction and sent after its commit (R30)."""
