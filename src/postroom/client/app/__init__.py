"""Handlers: functions that messages are given to, and what runs them."""
