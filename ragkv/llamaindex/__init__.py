"""LlamaIndex: archive while ingesting, and answer retrieved nodes from their archives instead of prefilling their text.

Needs the extra ``llama-index``.
"""

from __future__ import annotations

from ragkv.errors import MissingExtraError

try:
    import llama_index.core  # noqa: F401
except ImportError as error:
    raise MissingExtraError("ragkv.llamaindex needs llama-index-core: pip install 'ragkv[llama-index]'") from error

from ragkv.llamaindex.documents import DOCUMENT_KEY, ON_MISSING, Resolution, ResolvedDocument, resolve
from ragkv.llamaindex.llm import RagKVLLM
from ragkv.llamaindex.query_engine import RagKVQueryEngine
from ragkv.llamaindex.synthesizer import RagKVSynthesizer
from ragkv.llamaindex.transform import ArchiveTransform

__all__ = [
    "ArchiveTransform",
    "RagKVLLM",
    "RagKVQueryEngine",
    "RagKVSynthesizer",
    "DOCUMENT_KEY",
    "ON_MISSING",
    "Resolution",
    "ResolvedDocument",
    "resolve",
]
