"""A member of an ordered group: what it holds, key by key."""
