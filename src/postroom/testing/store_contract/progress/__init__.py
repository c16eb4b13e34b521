"""Promises of progress."""
