"""Share groups of Kafka clients (KIP-932): groups in mode "shared", as those clients know them."""
