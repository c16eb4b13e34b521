"""The client's side of the protocol."""
