"""What a pipeline takes in is archived once, and nodes name their archives without embeddings or prompts seeing it."""

from __future__ import annotations

import asyncio
import logging
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import Document, StorageContext, VectorStoreIndex, load_index_from_storage
from llama_index.core.ingestion import IngestionCache, IngestionPipeline
from llama_index.core.ingestion.pipeline import DocstoreStrategy, get_transformation_hash
from llama_index.core.node_parser import HierarchicalNodeParser, SentenceSplitter, get_leaf_nodes
from llama_index.core.retrievers import AutoMergingRetriever
from llama_index.core.schema import BaseNode, MetadataMode, TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import SimpleVectorStore

from ragkv import PromptLayout
from ragkv.catalog.catalog import Catalog
from ragkv.errors import ConfigError
from ragkv.llamaindex import DOCUMENT_KEY, ArchiveTransform, RagKVQueryEngine
from tests.archives import CODED, loaded
from tests.llamaindex_helpers import NAMES, QUESTION, TEXTS, WordEmbedding, fresh, hooked, make_catalog, text_nodes

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    return make_catalog(tmp_path / "c", loaded("llama"))


def documents() -> list[Document]:
    """As a reader gives them: fresh objects, the same ids."""
    return [
        Document(text=text, id_=f"doc-{place}", metadata={"file_name": NAMES[place]})
        for place, text in enumerate(TEXTS[:2])
    ]


def splitter() -> SentenceSplitter:
    return SentenceSplitter(chunk_size=60, chunk_overlap=0, tokenizer=str.split)


def ids_of(nodes: Any) -> list[str]:
    return [node.metadata[DOCUMENT_KEY] for node in nodes]


def test_in_front_of_a_parser_whole_documents_are_archived(catalog: Catalog) -> None:
    nodes = IngestionPipeline(transformations=[ArchiveTransform(catalog=catalog), splitter()]).run(
        documents=documents()
    )
    whole = [catalog.document_id(text) for text in TEXTS[:2]]
    assert len(nodes) > 2
    assert set(ids_of(nodes)) == {entry.id for entry in catalog.entries()} == set(whole)
    for node in nodes:
        text = catalog.archive(node.metadata[DOCUMENT_KEY]).text
        assert text in TEXTS
        assert node.get_content() in text
    assert sorted(entry.name for entry in catalog.entries()) == sorted(NAMES[:2])


def test_behind_a_parser_chunks_are_archived(catalog: Catalog) -> None:
    nodes = IngestionPipeline(transformations=[splitter(), ArchiveTransform(catalog=catalog)]).run(
        documents=documents()
    )
    assert len(nodes) == len(catalog.entries()) > 2
    assert ids_of(nodes) == [catalog.document_id(node.get_content()) for node in nodes]
    assert [catalog.archive(name).text for name in ids_of(nodes)] == [node.get_content() for node in nodes]


def test_neither_embedding_nor_prompt_sees_the_id(catalog: Catalog) -> None:
    transform = ArchiveTransform(catalog)
    (node,) = transform(documents()[:1])
    (again,) = transform([node])
    for mode in (MetadataMode.EMBED, MetadataMode.LLM):
        assert node.metadata[DOCUMENT_KEY] not in node.get_content(metadata_mode=mode)
        assert NAMES[0] in node.get_content(metadata_mode=mode)
    assert again.excluded_embed_metadata_keys == again.excluded_llm_metadata_keys == [DOCUMENT_KEY]


def test_the_given_nodes_are_not_changed_and_their_ids_stay(catalog: Catalog) -> None:
    given = documents()
    before = [(node.node_id, node.hash) for node in given]
    archived = ArchiveTransform(catalog)(given)
    assert [(node.node_id, node.hash) for node in given] == before
    assert [node.node_id for node in archived] == [node.node_id for node in given]
    assert all(isinstance(node, Document) for node in archived)


def test_a_document_store_knows_the_documents_again(catalog: Catalog) -> None:
    store = SimpleDocumentStore()
    transformations = [ArchiveTransform(catalog=catalog), splitter()]
    pipeline = IngestionPipeline(
        transformations=transformations,
        docstore=store,
        docstore_strategy=DocstoreStrategy.DUPLICATES_ONLY,
        disable_cache=True,
    )
    assert pipeline.run(documents=documents())
    assert pipeline.run(documents=documents()) == []


def test_nodes_without_text_get_no_id(catalog: Catalog, caplog: pytest.LogCaptureFixture) -> None:
    empty = TextNode(text=" \n", id_="blank")
    with caplog.at_level(logging.WARNING, logger="ragkv"):
        nodes = ArchiveTransform(catalog)([empty, *documents()[:1]])
    assert DOCUMENT_KEY not in nodes[0].metadata
    assert DOCUMENT_KEY in nodes[1].metadata
    assert "'blank' has no text" in caplog.text


def test_metadata_is_archived_where_it_is_asked_for(catalog: Catalog) -> None:
    (node,) = ArchiveTransform(catalog, metadata_mode=MetadataMode.ALL)(documents()[:1])
    text = catalog.archive(node.metadata[DOCUMENT_KEY]).text
    assert text == documents()[0].get_content(metadata_mode=MetadataMode.ALL)
    assert NAMES[0] in text


def test_progress_counts_nodes(catalog: Catalog) -> None:
    seen: list[tuple[int, int]] = []
    ArchiveTransform(catalog, on_progress=lambda done, total: seen.append((done, total)))(documents())
    assert seen == [(1, 2), (2, 2)]


def test_the_same_text_is_archived_once(catalog: Catalog) -> None:
    model = loaded("llama")
    with hooked(model, lambda _call: None) as calls:
        first = ids_of(ArchiveTransform(catalog)(documents()[:1]))
        built = len(calls)
        assert ids_of(ArchiveTransform(catalog)(documents()[:1] * 3)) == first * 3
    assert 0 < built == len(calls)


def test_the_key_of_a_cache_is_the_catalog_and_its_recipe(tmp_path: Path) -> None:
    model, layout = loaded("llama"), PromptLayout.plain()
    first = make_catalog(tmp_path / "a", model)

    def key(catalog: Catalog, **options: Any) -> str:
        return get_transformation_hash(documents(), ArchiveTransform(catalog, **options))

    same = Catalog.open(tmp_path / "a", fresh())
    elsewhere = make_catalog(tmp_path / "b", model)
    other_recipe = Catalog.create(tmp_path / "other" / "a", model, layout=layout, recipe=CODED)
    assert key(first) == key(first, on_progress=lambda _done, _total: None) == key(same)
    keys = [key(first), key(elsewhere), key(other_recipe), key(first, metadata_mode=MetadataMode.ALL)]
    assert len(set(keys)) == 4
    assert ArchiveTransform(first).to_dict()["class_name"] == "ArchiveTransform"


def test_on_a_cache_hit_nodes_keep_their_ids_and_nothing_is_built(catalog: Catalog) -> None:
    cache = IngestionCache()

    def run() -> list[BaseNode]:
        pipeline = IngestionPipeline(transformations=[ArchiveTransform(catalog=catalog), splitter()], cache=cache)
        return list(pipeline.run(documents=documents()))

    first = ids_of(run())
    catalog.remove(first[0])
    assert ids_of(run()) == first
    assert first[0] not in catalog


def test_it_cannot_be_pickled_and_says_so(catalog: Catalog) -> None:
    with pytest.raises(ConfigError, match="without num_workers"):
        pickle.dumps(ArchiveTransform(catalog))
    with pytest.raises(ConfigError, match="without num_workers"):
        IngestionPipeline(transformations=[ArchiveTransform(catalog)]).run(documents=documents(), num_workers=2)


def test_a_catalog_without_its_model_is_refused(catalog: Catalog) -> None:
    with pytest.raises(ConfigError, match="opened without a model"):
        ArchiveTransform(Catalog.open(catalog.path))


def test_an_async_pipeline_archives_in_another_thread(tmp_path: Path) -> None:
    model = fresh()
    catalog = make_catalog(tmp_path / "c", model)
    threads: set[int] = set()
    pipeline = IngestionPipeline(transformations=[ArchiveTransform(catalog=catalog)])
    with hooked(model, lambda _call: threads.add(threading.get_ident())):
        nodes = asyncio.run(pipeline.arun(documents=documents()))
    assert set(ids_of(nodes)) == {entry.id for entry in catalog.entries()}
    assert threads
    assert threading.get_ident() not in threads


def long_documents() -> list[Document]:
    return [
        Document(text=text * 3, id_=f"doc-{place}", metadata={"file_name": NAMES[place]})
        for place, text in enumerate(TEXTS)
    ]


@pytest.mark.parametrize("in_front", [False, True])
def test_merged_parents_are_served_from_archives(catalog: Catalog, in_front: bool) -> None:
    parser = HierarchicalNodeParser.from_defaults(chunk_sizes=[256, 64], chunk_overlap=0)
    transform = ArchiveTransform(catalog)
    all_nodes = parser(list(transform(long_documents()))) if in_front else list(transform(parser(long_documents())))
    store = SimpleDocumentStore()
    store.add_documents(all_nodes)
    context = StorageContext.from_defaults(docstore=store)
    index = VectorStoreIndex(get_leaf_nodes(all_nodes), storage_context=context, embed_model=WordEmbedding())
    retriever = AutoMergingRetriever(index.as_retriever(similarity_top_k=4), context, simple_ratio_thresh=0.1)
    response = RagKVQueryEngine.from_args(retriever, catalog, max_new_tokens=2).query(QUESTION)
    leaves = {node.node_id for node in get_leaf_nodes(all_nodes)}
    assert any(source.node.node_id not in leaves for source in response.source_nodes)
    assert response.metadata["ragkv"]["on_missing"]["prefilled"] == 0


def test_a_pipeline_that_upserts_archives_what_changed(catalog: Catalog) -> None:
    pipeline = IngestionPipeline(
        transformations=[ArchiveTransform(catalog), SentenceSplitter(chunk_size=128, chunk_overlap=0), WordEmbedding()],
        docstore=SimpleDocumentStore(),
        docstore_strategy=DocstoreStrategy.UPSERTS,
        vector_store=SimpleVectorStore(),
    )
    documents = long_documents()
    assert len(pipeline.run(documents=documents)) > 3
    assert pipeline.run(documents=documents) == []
    documents[0] = Document(text="Changed. " + TEXTS[0], id_="doc-0", metadata={"file_name": NAMES[0]})
    changed = pipeline.run(documents=documents)
    assert {node.ref_doc_id for node in changed} == {"doc-0"}
    assert {node.metadata[DOCUMENT_KEY] for node in changed} == {catalog.document_id(documents[0].text)}
    assert len(catalog.entries()) == 4


def test_a_stored_index_and_cache_serve_whoever_opens_the_catalog(catalog: Catalog, tmp_path: Path) -> None:
    cache = IngestionCache()
    nodes = IngestionPipeline(transformations=[ArchiveTransform(catalog)], cache=cache).run(documents=text_nodes())
    index = VectorStoreIndex(nodes, embed_model=WordEmbedding())
    index.storage_context.persist(str(tmp_path / "index"))
    cache.persist(str(tmp_path / "cache.json"))
    expected = RagKVQueryEngine.from_args(index.as_retriever(), catalog, max_new_tokens=4).query(QUESTION)

    model = fresh()
    opened = Catalog.open(catalog.path, model)
    again = IngestionCache.from_persist_path(str(tmp_path / "cache.json"))
    context = StorageContext.from_defaults(persist_dir=str(tmp_path / "index"))
    stored = load_index_from_storage(context, embed_model=WordEmbedding())
    with hooked(model, lambda _call: None) as calls:
        assert (
            IngestionPipeline(transformations=[ArchiveTransform(opened)], cache=again).run(documents=text_nodes())
            == nodes
        )
    assert calls == []
    response = RagKVQueryEngine.from_args(stored.as_retriever(), opened, max_new_tokens=4).query(QUESTION)
    assert str(response) == str(expected)
    assert response.metadata["ragkv"]["on_missing"]["served"] == 2
