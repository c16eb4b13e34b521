"""Commands about topics, groups, routes, shards, rates and principals."""
