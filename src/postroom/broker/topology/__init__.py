"""Topics, groups, routes and shards, and how they change."""
