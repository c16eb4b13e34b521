"""Names, routes of partitions, and plans to split them."""
