"""Commands for those who run brokers and workers."""
