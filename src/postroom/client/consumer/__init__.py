"""Receiving: deliveries come into a consumer's hands, and are settled."""
