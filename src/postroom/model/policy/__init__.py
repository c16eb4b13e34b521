"""Settings, limits, access, and the rules that follow from them."""
