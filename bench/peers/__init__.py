"""Postroom beside other queues: one producer process, one consumer process, durable and confirmed."""
