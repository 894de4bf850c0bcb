"""The text that ``ragkv bench`` uses when none is given: the Python reference that ships with every Python.

It is long, real, offline, and the same for everybody with the same Python version.
"""

from __future__ import annotations

from pydoc_data.topics import topics

_LONGEST_TOPIC = 30_000


def default_text() -> str:
    """Reference topics in alphabetical order, the very long ones left out: about 310,000 characters."""
    return "\n\n".join(topics[name] for name in sorted(topics) if len(topics[name]) < _LONGEST_TOPIC)
