"""A local file that messages land in first, and leave from when the queue is there (R31)."""
