"""The way of a message to a member: poll, settle, heartbeat."""
