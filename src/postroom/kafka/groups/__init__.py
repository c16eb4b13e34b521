"""Consumer groups of Kafka clients: who is in them, and what they have committed."""
