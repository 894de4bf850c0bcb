"""Peers: what other systems do with a prefilled cache, imitated for comparison only."""
