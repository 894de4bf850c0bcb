"""Online: open archives, choose clusters for a query, and attend."""
