"""Outsiders' clients of Kafka, and their own tests, against our listener: `make kafka-clients`."""
