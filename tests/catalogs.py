"""Catalogs of tiny archives that the tests of catalogs share."""

from __future__ import annotations

import os
import time
from pathlib import Path

from ragkv import LoadedModel, PromptLayout
from ragkv.archive.publish import LOCK_FILE
from ragkv.catalog.catalog import Catalog
from tests.archives import SMALL, loaded
from tests.tiny import TEXT

TEXTS = tuple(TEXT.replace("ferry", boat) for boat in ("barge", "cutter", "dinghy"))
PLAIN = PromptLayout.plain()


def make(path: Path, model: LoadedModel | None = None, *, max_open: int = 64) -> Catalog:
    return Catalog.create(path, model or loaded("llama"), layout=PLAIN, recipe=SMALL, max_open=max_open)


def fill(path: Path) -> Path:
    """A catalog of three documents."""
    catalog = make(path)
    for text, name in zip(TEXTS, ("Barge.txt", "cutter.txt", "dinghy.txt"), strict=True):
        catalog.add(text, name=name)
    return path


def documents(catalog: Catalog) -> list[str]:
    """What stands in the folder of documents beside its lock."""
    return sorted(found.name for found in (catalog.path / "documents").iterdir() if found.name != LOCK_FILE)


def age(path: Path, seconds: float) -> None:
    """Make `path` and all in it so much older."""
    for found in (path, *path.rglob("*")):
        os.utime(found, (time.time() - seconds,) * 2)
