"""Promises of the log."""
