"""Nodes become documents, each once, and what happens without a usable archive is chosen and told."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import Document
from llama_index.core.ingestion import IngestionCache, IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import BaseNode, NodeWithScore, TextNode

from ragkv import LoadedModel, attach, build_archive
from ragkv.answer.ask import ask
from ragkv.catalog.catalog import Catalog
from ragkv.errors import ArchiveNotFoundError, ArchiveReadError
from ragkv.llamaindex import DOCUMENT_KEY, ArchiveTransform, RagKVSynthesizer, resolve
from ragkv.recall.composition import Composition
from ragkv.recall.prefilled import prefill_document
from tests.archives import SMALL, loaded
from tests.llamaindex_helpers import N_NEW, NAMES, QUESTION, TEXTS, archived_nodes, make_catalog, text_nodes
from tests.tiny import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    catalog = make_catalog(tmp_path_factory.mktemp("missing") / "c", loaded("llama"))
    archived_nodes(catalog)
    return catalog


@pytest.fixture
def catalog(filled: Catalog, tmp_path: Path) -> Catalog:
    """A copy of a catalog of `TEXTS`."""
    return make_catalog(shutil.copytree(filled.path, tmp_path / "c"), loaded("llama"))


@pytest.fixture
def nodes(catalog: Catalog) -> list[BaseNode]:
    return archived_nodes(catalog)


def origins(nodes: list[BaseNode], catalog: Catalog, on_missing: str = "prefill") -> list[str]:
    return [document.origin for document in resolve(nodes, catalog, on_missing=on_missing).documents]


def flip(catalog: Catalog, document_id: str) -> None:
    """Change one byte of a document's first file of rows; its length stays."""
    path = sorted((catalog.path / "documents" / document_id).rglob("*.parquet"))[0]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def remove(catalog: Catalog, document_id: str) -> None:
    catalog.remove(document_id)


def cut(catalog: Catalog, document_id: str) -> None:
    manifest = catalog.path / "documents" / document_id / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:100])


def another_version(catalog: Catalog, document_id: str) -> None:
    manifest = catalog.path / "documents" / document_id / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"version": ', '"version": 9', 1))


def another_model(catalog: Catalog, document_id: str) -> None:
    path = catalog.path / "documents" / document_id
    shutil.rmtree(path)
    other = LoadedModel(model=attach(tiny_model("llama", seed=1)), tokenizer=tiny_tokenizer(), name="other")
    build_archive(other, TEXTS[0], path, recipe=SMALL, layout=catalog.layout)


WAYS = {
    "removed": (remove, "not found"),
    "flipped": (flip, "damaged"),
    "cut": (cut, "damaged"),
    "version": (another_version, "another format"),
    "model": (another_model, "another model"),
}


@pytest.fixture(params=WAYS)
def broken(request: pytest.FixtureRequest, catalog: Catalog, nodes: list[BaseNode]) -> tuple[Catalog, str]:
    """The catalog without a usable archive of the first node, and why."""
    spoil, reason = WAYS[request.param]
    spoil(catalog, nodes[0].metadata[DOCUMENT_KEY])
    return make_catalog(catalog.path, loaded("llama")), reason


def answered(nodes: list[BaseNode], catalog: Catalog, **options: Any) -> Any:
    synthesizer = RagKVSynthesizer(catalog, max_new_tokens=N_NEW, **options)
    return synthesizer.synthesize(QUESTION, [NodeWithScore(node=node, score=0.5) for node in nodes])


def test_prefill_computes_the_text_for_this_request(broken: tuple[Catalog, str], nodes: list[BaseNode]) -> None:
    catalog, reason = broken
    response = answered(nodes[:2], catalog)
    report = response.metadata["ragkv"]
    assert report["on_missing"] == {
        "policy": "prefill",
        "served": 1,
        "prefilled": 1,
        "built": 0,
        "reasons": {"node-0": reason},
    }
    prefilled = prefill_document(loaded("llama"), TEXTS[0], layout=catalog.layout)
    kept = catalog.archive(nodes[1].metadata[DOCUMENT_KEY])
    answer = ask(Composition([prefilled, kept]), QUESTION, max_new_tokens=N_NEW)
    assert response.response == answer.text
    assert report["usage"]["prompt_tokens_prefilled"] == answer.prefilled_tokens + prefilled.n_tokens
    assert report["usage"]["prompt_tokens_from_archives"] == kept.n_tokens - kept.prefix_tokens
    assert origins(nodes[:1], catalog) == ["prefilled"]


def test_build_mends_the_catalog(broken: tuple[Catalog, str], nodes: list[BaseNode]) -> None:
    catalog, reason = broken
    report = answered(nodes[:2], catalog, on_missing="build").metadata["ragkv"]
    assert report["on_missing"]["reasons"] == {"node-0": reason}
    # A removed archive that is whole comes back as it was.
    assert report["documents"][0]["origin"] == ("archive" if reason == "not found" else "built")
    again = answered(nodes[:2], make_catalog(catalog.path, loaded("llama")), on_missing="raise").metadata["ragkv"]
    assert again["on_missing"]["served"] == 2
    assert again["on_missing"]["reasons"] == {}


def test_raise_names_the_node(broken: tuple[Catalog, str], nodes: list[BaseNode]) -> None:
    catalog, _ = broken
    with pytest.raises(ArchiveNotFoundError, match="node 'node-0' has no archive that serves"):
        answered(nodes[:2], catalog, on_missing="raise")
    assert answered(nodes[1:], catalog, on_missing="raise").response


def test_a_built_document_counts_as_prefilled_once(tmp_path: Path) -> None:
    catalog, given = make_catalog(tmp_path / "c", loaded("llama")), list(text_nodes()[:1])
    first, second = (answered(given, catalog, on_missing="build").metadata["ragkv"] for _ in range(2))
    assert first["documents"][0]["origin"] == "built"
    assert second["documents"][0]["origin"] == "archive"
    assert first["usage"]["prompt_tokens_from_archives"] == 0
    assert first["usage"]["prompt_tokens"] == second["usage"]["prompt_tokens"]
    assert first["usage"]["prompt_tokens_prefilled"] == first["usage"]["prompt_tokens"]


def test_nodes_without_an_id_are_found_by_their_text(catalog: Catalog) -> None:
    assert origins(list(text_nodes()), catalog, "raise") == ["archive"] * 3


def test_an_id_that_is_none_counts_as_missing(catalog: Catalog) -> None:
    strange: list[BaseNode] = [TextNode(text="Something new.", id_="x", metadata={DOCUMENT_KEY: "../x"})]
    found = resolve(strange, catalog)
    assert [document.origin for document in found.documents] == ["prefilled"]
    assert found.reasons == {"x": "not found"}


def test_nodes_of_one_document_give_it_once_in_order_of_appearance(catalog: Catalog, nodes: list[BaseNode]) -> None:
    first, second = nodes[0].metadata, nodes[1].metadata
    chunks: list[BaseNode] = [
        TextNode(text="one", id_="a", metadata=second),
        TextNode(text="two", id_="b", metadata=first),
        TextNode(text="three", id_="c", metadata=second),
        TextNode(text=TEXTS[0], id_="d"),
    ]
    found = resolve(chunks, catalog, on_missing="raise")
    assert [document.id for document in found.documents] == [second[DOCUMENT_KEY], first[DOCUMENT_KEY]]
    assert [document.node_ids for document in found.documents] == [("a", "c"), ("b", "d")]
    assert found.to_dict() == {"served": 2, "prefilled": 0, "built": 0, "reasons": {}}


def test_chunks_of_a_missing_document_stand_in_with_their_own_text(catalog: Catalog, nodes: list[BaseNode]) -> None:
    catalog.remove(nodes[0].metadata[DOCUMENT_KEY])
    chunks: list[BaseNode] = [
        TextNode(text=text, id_=name, metadata=nodes[0].metadata)
        for name, text in (("a", "The first part."), ("b", "The second part."), ("c", "The first part."))
    ]
    found = resolve(chunks, catalog)
    assert [document.document.text for document in found.documents] == ["The first part.", "The second part."]
    assert [document.node_ids for document in found.documents] == [("a", "c"), ("b",)]
    assert found.reasons == dict.fromkeys("abc", "not found")
    assert {document.document.name for document in found.documents} == {NAMES[0]}


def test_archived_and_new_nodes_mix(catalog: Catalog, nodes: list[BaseNode]) -> None:
    new = TextNode(text="A new report about the tide.", id_="new")
    response = answered([nodes[2], new, nodes[0]], catalog)
    found = response.metadata["ragkv"]["documents"]
    assert [each["origin"] for each in found] == ["archive", "prefilled", "archive"]
    assert [each["name"] for each in found] == [NAMES[2], "new", NAMES[0]]
    assert [each["id"] for each in response.metadata["ragkv"]["evidence"]] == [
        each["id"] for each in response.metadata["ragkv"]["documents"]
    ]
    assert len(response.source_nodes) == 3
    assert len(catalog.entries()) == 3


def test_nodes_without_text_are_left_out(catalog: Catalog, nodes: list[BaseNode]) -> None:
    blank = TextNode(text=" ", id_="blank")
    report = answered([blank, nodes[0]], catalog, on_missing="raise").metadata["ragkv"]
    assert report["on_missing"]["served"] == 1
    assert report["on_missing"]["reasons"] == {"blank": "empty"}
    nothing = answered([blank], catalog)
    assert nothing.response == "Empty Response"
    assert [source.node_id for source in nothing.source_nodes] == ["blank"]


def test_an_archive_that_a_pipelines_cache_hid_is_missed_and_told(tmp_path: Path) -> None:
    cache, document = IngestionCache(), Document(text=TEXTS[0], id_="doc")
    splitter = SentenceSplitter(chunk_size=60, chunk_overlap=0, tokenizer=str.split)

    def run(catalog: Catalog) -> list[BaseNode]:
        pipeline = IngestionPipeline(transformations=[ArchiveTransform(catalog=catalog), splitter], cache=cache)
        return list(pipeline.run(documents=[document]))

    run(make_catalog(tmp_path / "c", loaded("llama")))
    shutil.rmtree(tmp_path / "c")
    emptied = make_catalog(tmp_path / "c", loaded("llama"))
    chunks = run(emptied)
    assert emptied.entries() == []
    report = answered(chunks, emptied).metadata["ragkv"]["on_missing"]
    assert report["prefilled"] == len(chunks) == len(report["reasons"])
    with pytest.raises(ArchiveNotFoundError, match="on_missing"):
        answered(chunks, emptied, on_missing="raise")
    assert answered(chunks, emptied, on_missing="build").metadata["ragkv"]["on_missing"]["built"] == len(chunks)
    # The metadata still names the whole document; each chunk's own archive serves now.
    again = answered(chunks, emptied, on_missing="raise").metadata["ragkv"]["on_missing"]
    assert again["served"] == len(chunks)


@pytest.mark.parametrize("on_missing", ["prefill", "build", "raise"])
def test_an_archive_that_cannot_be_read_now_is_an_error_and_no_prefill(
    catalog: Catalog, nodes: list[BaseNode], on_missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A passing error says nothing about the archive: to prefill instead would hide it, and cost what archives save."""
    real = os.open

    def refused(path: Any, *words: Any, **named: Any) -> int:
        if str(path).endswith("tokens.parquet"):
            raise OSError(errno.EIO, "Input/output error")
        return real(path, *words, **named)

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("it was prefilled")

    monkeypatch.setattr("ragkv.llamaindex.documents.prefill_document", never)
    monkeypatch.setattr("ragkv.build.builder.prefill_cache", never)
    monkeypatch.setattr(os, "open", refused)
    before = sorted(path.name for path in (catalog.path / "documents").iterdir())
    with pytest.raises(ArchiveReadError, match="Input/output error"):
        resolve(nodes, catalog, on_missing=on_missing)
    monkeypatch.setattr(os, "open", real)
    assert sorted(path.name for path in (catalog.path / "documents").iterdir()) == before
    assert origins(nodes, catalog) == ["archive"] * len(TEXTS)
