"""Faults made on purpose: archives replaced, processes killed and files tampered with; see `pipelines.faults`."""
