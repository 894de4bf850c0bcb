"""Time limit of the notebooks: each is one test item that runs for minutes, not for the seconds of the others."""

from __future__ import annotations

import pytest

NOTEBOOK_SECONDS = 1200


def pytest_itemcollected(item: pytest.Item) -> None:
    """Give a notebook its own limit; the first use of the demo model converts it, which is counted too."""
    if item.path.suffix == ".ipynb":
        item.add_marker(pytest.mark.timeout(NOTEBOOK_SECONDS))
