"""A partition's log: append, read, and the ids it has seen."""
