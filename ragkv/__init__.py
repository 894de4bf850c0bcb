"""ragkv archives the KV cache of a long document and answers questions from the archive.

Names are imported on first use, so that importing the package stays quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ragkv.version import __version__

if TYPE_CHECKING:
    from ragkv.answer.ask import Answer, ask
    from ragkv.archive.verify import verify_archive
    from ragkv.build.builder import BuildResult, build_archive
    from ragkv.catalog.catalog import Catalog
    from ragkv.catalog.entries import CatalogEntry
    from ragkv.errors import RagkvError
    from ragkv.model.attention import attach
    from ragkv.model.load import LoadedModel, load_model
    from ragkv.model.prompt import PromptLayout
    from ragkv.recall.archive import Archive
    from ragkv.recall.cache import ArchiveCache
    from ragkv.recall.composition import Composition
    from ragkv.recall.placed import Weighting
    from ragkv.recall.prefilled import PrefilledDocument, prefill_document
    from ragkv.recall.recompute import recompute
    from ragkv.recall.trace import RecallTrace
    from ragkv.recipe import RecallPolicy, Recipe

_HOMES = {
    "Answer": "answer.ask",
    "Archive": "recall.archive",
    "ArchiveCache": "recall.cache",
    "BuildResult": "build.builder",
    "Catalog": "catalog.catalog",
    "CatalogEntry": "catalog.entries",
    "Composition": "recall.composition",
    "LoadedModel": "model.load",
    "PrefilledDocument": "recall.prefilled",
    "PromptLayout": "model.prompt",
    "RagkvError": "errors",
    "RecallPolicy": "recipe",
    "RecallTrace": "recall.trace",
    "Recipe": "recipe",
    "Weighting": "recall.placed",
    "ask": "answer.ask",
    "attach": "model.attention",
    "build_archive": "build.builder",
    "load_model": "model.load",
    "prefill_document": "recall.prefilled",
    "recompute": "recall.recompute",
    "verify_archive": "archive.verify",
}

__all__ = [
    "Answer",
    "Archive",
    "ArchiveCache",
    "BuildResult",
    "Catalog",
    "CatalogEntry",
    "Composition",
    "LoadedModel",
    "PrefilledDocument",
    "PromptLayout",
    "RagkvError",
    "RecallPolicy",
    "RecallTrace",
    "Recipe",
    "Weighting",
    "__version__",
    "ask",
    "attach",
    "build_archive",
    "load_model",
    "prefill_document",
    "recompute",
    "verify_archive",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ragkv' has no attribute {name!r}")
    return getattr(import_module(f"ragkv.{_HOMES[name]}"), name)
