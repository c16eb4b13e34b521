"""Each suite: what it is called, and how it is run against a listener."""
