"""What a queue can be asked: one vocabulary for broker, wire and client."""
