"""For tests: those of users, and those of people who write a store of their own (`store_contract`)."""
