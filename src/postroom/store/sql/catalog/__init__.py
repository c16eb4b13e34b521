"""Topics, groups and routes."""
