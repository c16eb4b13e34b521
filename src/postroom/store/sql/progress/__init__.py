"""A group's progress: cursors, deliveries and members."""
