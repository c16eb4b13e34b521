"""A listener for Kafka clients: the edge at which any of them talks to a queue, unchanged."""
