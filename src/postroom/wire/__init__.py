"""The protocol of served brokers: frames and messages, the server, and the endpoint that speaks to it."""
