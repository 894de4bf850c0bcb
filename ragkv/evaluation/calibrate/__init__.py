"""Calibrate: find the recipe for a model and a corpus by a stated rule."""
