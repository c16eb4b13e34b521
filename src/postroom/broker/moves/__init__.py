"""Messages that move: due, staged, retried, dead."""
