"""Messages and their batches: what they are made of, and what makes one acceptable."""
