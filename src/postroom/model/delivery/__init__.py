"""What a group has received, and what becomes of it."""
