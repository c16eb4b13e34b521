"""The broker's side of the protocol."""
