"""Ask, stream, and show where an answer looked."""
