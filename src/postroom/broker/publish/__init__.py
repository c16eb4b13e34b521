"""The way of a message into the log: backlog, rates, the writer."""
