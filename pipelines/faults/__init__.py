"""Faults made on purpose: archives replaced while they are read, builds killed at each step, files altered.

Run with ``python -m pipelines.faults``; the tests call the same functions with small numbers.
"""
