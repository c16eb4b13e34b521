"""Sending: messages gather into batches, and batches become receipts."""
