"""ragkv archives the KV cache of a long document and answers questions from the archive.

Names are imported on first use, so that importing the package stays quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ragkv.version import __version__

if TYPE_CHECKING:
    from ragkv.answer import Answer, ask
    from ragkv.archive import Archive
    from ragkv.attention import attach
    from ragkv.build import BuildResult, build_archive
    from ragkv.cache import ArchiveCache
    from ragkv.catalog import Catalog
    from ragkv.compose import Composition
    from ragkv.errors import RagkvError
    from ragkv.layout import PromptLayout
    from ragkv.models import LoadedModel, load_model
    from ragkv.recipe import Recipe
    from ragkv.trace import RecallTrace

_HOMES = {
    "Answer": "answer",
    "Archive": "archive",
    "ArchiveCache": "cache",
    "BuildResult": "build",
    "Catalog": "catalog",
    "Composition": "compose",
    "LoadedModel": "models",
    "PromptLayout": "layout",
    "RagkvError": "errors",
    "RecallTrace": "trace",
    "Recipe": "recipe",
    "ask": "answer",
    "attach": "attention",
    "build_archive": "build",
    "load_model": "models",
}

__all__ = [
    "Answer",
    "Archive",
    "ArchiveCache",
    "BuildResult",
    "Catalog",
    "Composition",
    "LoadedModel",
    "PromptLayout",
    "RagkvError",
    "RecallTrace",
    "Recipe",
    "__version__",
    "ask",
    "attach",
    "build_archive",
    "load_model",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ragkv' has no attribute {name!r}")
    return getattr(import_module(f"ragkv.{_HOMES[name]}"), name)
