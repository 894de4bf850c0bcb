"""Jobs that run from a checkout, and what only they use."""
