"""A queue on several databases."""
