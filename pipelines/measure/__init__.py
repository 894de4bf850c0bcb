"""Measure: what composed archives answer, and what their answers looked at, beside a joint prefill."""
