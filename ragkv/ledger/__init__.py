"""What a cache costs and whether ragkv suits a workload, from numbers alone."""
