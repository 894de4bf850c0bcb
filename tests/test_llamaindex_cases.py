"""What people build with LlamaIndex around an engine: tools, routers, chats, copies; hard nodes and questions."""

from __future__ import annotations

import asyncio
import copy
import pickle
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import Document, Settings, VectorStoreIndex
from llama_index.core.base.base_selector import BaseSelector, SelectorResult, SingleSelection
from llama_index.core.indices.query.query_transform import HyDEQueryTransform
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.query_engine import (
    CitationQueryEngine,
    RetrieverQueryEngine,
    RouterQueryEngine,
    SubQuestionQueryEngine,
    TransformQueryEngine,
)
from llama_index.core.question_gen.types import BaseQuestionGenerator, SubQuestion
from llama_index.core.response_synthesizers import TreeSummarize
from llama_index.core.schema import ImageNode, IndexNode, MediaResource, MetadataMode, Node, NodeWithScore, TextNode
from llama_index.core.tools import QueryEngineTool

from ragkv.catalog.catalog import Catalog
from ragkv.errors import ConfigError
from ragkv.llamaindex import DOCUMENT_KEY, ArchiveTransform, RagKVLLM, RagKVQueryEngine, RagKVSynthesizer, resolve
from ragkv.recall.composition import Composition
from tests.archives import loaded
from tests.llamaindex_helpers import (
    N_NEW,
    QUESTION,
    WordEmbedding,
    archived_nodes,
    hooked,
    make_catalog,
    retriever_of,
    text_nodes,
)

pytestmark = pytest.mark.timeout(60)
QUESTIONS = (QUESTION, "Who bought the cranes?", "Where is the green book?", "How many ferries?")


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    return make_catalog(tmp_path_factory.mktemp("cases") / "c", loaded("llama"))


@pytest.fixture(scope="module")
def nodes(catalog: Catalog) -> list[Any]:
    return archived_nodes(catalog)


@pytest.fixture(scope="module")
def llm() -> RagKVLLM:
    return RagKVLLM(loaded("llama"), max_new_tokens=4)


def engine(catalog: Catalog, nodes: list[Any], **options: Any) -> RagKVQueryEngine:
    return RagKVQueryEngine.from_args(retriever_of(nodes), catalog, **{"max_new_tokens": N_NEW, **options})


class First(BaseSelector):
    """Selects the first tool."""

    def _get_prompts(self) -> dict[str, Any]:
        return {}

    def _update_prompts(self, prompts_dict: dict[str, Any]) -> None: ...

    def _select(self, choices: Any, query: Any) -> SelectorResult:
        return SelectorResult(selections=[SingleSelection(index=0, reason="first")])

    async def _aselect(self, choices: Any, query: Any) -> SelectorResult:
        return self._select(choices, query)


class Twice(BaseQuestionGenerator):
    """Asks two questions of the tool ``docs``."""

    def _get_prompts(self) -> dict[str, Any]:
        return {}

    def _update_prompts(self, prompts_dict: dict[str, Any]) -> None: ...

    def generate(self, tools: Any, query: Any) -> list[SubQuestion]:
        return [SubQuestion(sub_question=each, tool_name="docs") for each in QUESTIONS[:2]]

    async def agenerate(self, tools: Any, query: Any) -> list[SubQuestion]:
        return self.generate(tools, query)


def test_no_way_through_an_engine_asks_for_the_default_llm(
    catalog: Catalog, nodes: list[Any], llm: RagKVLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LlamaIndex's default is a service on the network; every engine here gives the same answer without it."""
    monkeypatch.setattr(Settings, "_llm", None)
    plain = engine(catalog, nodes)
    expected = str(plain.query(QUESTION))
    tool = QueryEngineTool.from_defaults(plain, name="docs", description="harbour")
    synthesizer = RagKVSynthesizer(catalog, max_new_tokens=N_NEW)
    index = VectorStoreIndex(nodes, embed_model=WordEmbedding())
    asked = [
        RetrieverQueryEngine(retriever_of(nodes), response_synthesizer=synthesizer),
        index.as_query_engine(llm=llm, response_synthesizer=synthesizer, similarity_top_k=2),
        CitationQueryEngine.from_args(index, llm=llm, response_synthesizer=synthesizer, similarity_top_k=2),
        RouterQueryEngine(First(), [tool], llm=llm, summarizer=TreeSummarize(llm=llm)),
    ]
    for each in asked:
        assert str(each.query(QUESTION)) == expected
        assert str(asyncio.run(each.aquery(QUESTION))) == expected
    assert tool.call(QUESTION).content == asyncio.run(tool.acall(QUESTION)).content == expected
    transformed = TransformQueryEngine(plain, HyDEQueryTransform(llm=llm))
    assert transformed.query(QUESTION).metadata["ragkv"]["usage"]
    assert Settings._llm is None


@pytest.mark.parametrize("use_async", [False, True])
def test_sub_questions_are_answered_and_their_answers_composed(
    catalog: Catalog, nodes: list[Any], llm: RagKVLLM, use_async: bool
) -> None:
    asked = SubQuestionQueryEngine.from_defaults(
        [QueryEngineTool.from_defaults(engine(catalog, nodes), name="docs", description="harbour")],
        llm=llm,
        question_gen=Twice(),
        response_synthesizer=RagKVSynthesizer(catalog, max_new_tokens=N_NEW),
        use_async=use_async,
        verbose=False,
    )
    report = asked.query("What is there?").metadata["ragkv"]
    assert report["on_missing"]["prefilled"] == 2


@pytest.mark.parametrize("streaming", [False, True])
def test_a_chat_engine_over_an_engine_condenses_with_the_model(
    catalog: Catalog, nodes: list[Any], llm: RagKVLLM, streaming: bool
) -> None:
    from llama_index.core.chat_engine import CondenseQuestionChatEngine

    asked = engine(catalog, nodes, streaming=streaming)
    chat = CondenseQuestionChatEngine.from_defaults(asked, llm=llm)
    expected = str(engine(catalog, nodes).query(QUESTION))
    said = "".join(chat.stream_chat(QUESTION).response_gen) if streaming else str(chat.chat(QUESTION))
    assert said == expected
    assert str(chat.chat("And then?"))


def test_every_kind_of_node_is_archived_and_answered_from(catalog: Catalog) -> None:
    kinds = [
        ImageNode(text="", image="aGk="),
        ImageNode(text="A picture of a crane.", image="aGk="),
        IndexNode(text="An index of ships.", index_id="ships"),
        Document(text="A whole document."),
        Node(text_resource=MediaResource(text="A node of several media.")),
        Node(),
        TextNode(text=" \n"),
        TextNode(text="Tides.", metadata={"huge": "x" * 50_000}),
        TextNode(text="\x00 a null, <|eos|> a token, \N{GRINNING FACE}"),
    ]
    archived = ArchiveTransform(catalog)(kinds)
    assert [DOCUMENT_KEY in node.metadata for node in archived] == [
        False,
        True,
        True,
        True,
        True,
        False,
        False,
        True,
        True,
    ]
    found = resolve(archived, catalog, on_missing="raise")
    assert [each.document.text for each in found.documents] == [
        kind.get_content() for kind in kinds if kind.get_content().strip()
    ]
    assert found.documents == resolve(kinds, catalog, on_missing="raise").documents


@pytest.mark.parametrize("mode", list(MetadataMode))
def test_the_id_of_an_archive_is_no_part_of_the_text_that_it_is_of(tmp_path: Path, mode: MetadataMode) -> None:
    """Else a removed archive could not be built again, and archiving twice would give two."""
    catalog = make_catalog(tmp_path / "c", loaded("llama"))
    transform = ArchiveTransform(catalog, metadata_mode=mode)
    once = list(transform(text_nodes()))
    ids = [node.metadata[DOCUMENT_KEY] for node in once]
    assert [node.metadata[DOCUMENT_KEY] for node in transform(once)] == ids
    for each in ids:
        catalog.remove(each)
    built = resolve(once, catalog, on_missing="build", metadata_mode=mode)
    assert [each.id for each in built.documents] == ids
    assert all(node.metadata[DOCUMENT_KEY] for node in once)


@pytest.mark.parametrize("text", ["a b c " * 3000, "half a \ud800 character"])
def test_a_text_that_cannot_be_archived_names_its_node(catalog: Catalog, nodes: list[Any], text: str) -> None:
    bad = TextNode(text=text, id_="the-bad-one")
    with pytest.raises(ConfigError, match="the-bad-one"):
        ArchiveTransform(catalog)([*text_nodes(), bad])
    for policy in ("prefill", "build"):
        with pytest.raises(ConfigError, match="the-bad-one"):
            resolve([*nodes, bad], catalog, on_missing=policy)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("question", ["", " \n"])
def test_an_empty_question_is_refused_before_anything_is_done(
    catalog: Catalog, nodes: list[Any], question: str, streaming: bool
) -> None:
    asked = engine(catalog, nodes, streaming=streaming)
    bare = [NodeWithScore(node=TextNode(text="A text without an archive."))]
    with hooked(loaded("llama"), lambda _call: None) as calls:
        for ask in (
            asked.query,
            lambda q: asyncio.run(asked.aquery(q)),
            lambda q: asked._response_synthesizer.synthesize(q, bare),
        ):
            with pytest.raises(ConfigError, match="the question is empty"):
                ask(question)
        with pytest.raises(ConfigError, match="the question is empty"):
            asked._response_synthesizer.get_response(question, ["A text without an archive."])
    assert calls == []


def test_a_question_beyond_the_context_is_refused(catalog: Catalog, nodes: list[Any]) -> None:
    with hooked(loaded("llama"), lambda _call: None) as calls, pytest.raises(ConfigError, match="the documents leave"):
        engine(catalog, nodes).query("x" * 5000)
    assert calls == []


def test_a_question_that_just_fits_is_answered(catalog: Catalog, nodes: list[Any]) -> None:
    """Of the model's context as LlamaIndex is told it, less the question's frame and one token."""
    source = Composition([catalog.archive(node.metadata[DOCUMENT_KEY]) for node in nodes])
    over = RagKVLLM(loaded("llama"), source=source, max_new_tokens=1)
    frame = source.questions(["x"])["input_ids"].shape[1] - 1
    room = over.metadata.context_window - frame - 1
    with pytest.raises(ConfigError, match="documents leave"):
        over.complete("x" * (room + 1))
    assert over.complete("x" * room).raw["usage"]["prompt_tokens"] == 4095


def test_a_prompt_that_is_no_text_is_refused(llm: RagKVLLM) -> None:
    with pytest.raises(ConfigError, match="not valid text"):
        llm.complete("half a \ud800 character")


def test_deep_copies_share_the_model_and_answer_the_same(catalog: Catalog, nodes: list[Any], llm: RagKVLLM) -> None:
    asked = engine(catalog, nodes)
    expected = str(asked.query(QUESTION))
    assert str(copy.deepcopy(asked).query(QUESTION)) == str(copy.copy(asked).query(QUESTION)) == expected
    other = copy.deepcopy(llm)
    assert other is not llm
    assert other._model is llm.model_copy(deep=True)._model is llm._model
    other.max_new_tokens = 1
    assert llm.max_new_tokens == 4
    assert copy.deepcopy(ArchiveTransform(catalog))(text_nodes()) == nodes


@pytest.mark.parametrize("kind", ["engine", "synthesizer", "llm", "llm over archives", "transform"])
def test_pickling_is_refused_in_one_sentence(catalog: Catalog, nodes: list[Any], llm: RagKVLLM, kind: str) -> None:
    archive = catalog.archive(nodes[0].metadata[DOCUMENT_KEY])
    parts = {
        "engine": engine(catalog, nodes),
        "synthesizer": RagKVSynthesizer(catalog),
        "llm": llm,
        "llm over archives": RagKVLLM(loaded("llama"), source=archive),
        "transform": ArchiveTransform(catalog),
    }
    with pytest.raises(ConfigError, match="cannot be pickled"):
        pickle.dumps(parts[kind])


class Raises(BaseNodePostprocessor):
    """Fails."""

    def _postprocess_nodes(self, nodes: Any, query_bundle: Any = None) -> Any:
        raise OSError("postprocessor")


def test_a_postprocessor_that_fails_fails_at_the_caller(catalog: Catalog, nodes: list[Any]) -> None:
    asked = engine(catalog, nodes, node_postprocessors=[Raises()])
    for ask in (asked.query, lambda q: asyncio.run(asked.aquery(q))):
        with pytest.raises(OSError, match="postprocessor"):
            ask(QUESTION)


class Deaf(BaseEventHandler):
    """Fails at every event."""

    def handle(self, event: Any, **kwargs: Any) -> None:
        raise RuntimeError("event handler")


def test_event_handlers_that_fail_disturb_no_answer(catalog: Catalog, nodes: list[Any]) -> None:
    expected = str(engine(catalog, nodes).query(QUESTION))
    handlers = get_dispatcher().event_handlers
    before = list(handlers)
    handlers.append(Deaf())
    try:
        assert str(engine(catalog, nodes).query(QUESTION)) == expected
        assert str(engine(catalog, nodes, streaming=True).query(QUESTION)) == expected
    finally:
        handlers[:] = before


def test_threads_get_the_serial_answers_while_documents_come_and_go(catalog: Catalog, nodes: list[Any]) -> None:
    asked, end = engine(catalog, nodes), threading.Event()
    expected = {question: str(asked.query(question)) for question in QUESTIONS}

    def come_and_go() -> int:
        turns = 0
        while not end.is_set() or turns == 0:
            catalog.remove(catalog.add(f"Another text, number {turns % 3}, about tides.").id)
            turns += 1
        return turns

    with ThreadPoolExecutor(9) as pool:
        changes = pool.submit(come_and_go)
        try:
            answers = list(pool.map(lambda question: (question, str(asked.query(question))), QUESTIONS * 6))
        finally:
            end.set()
        assert changes.result() > 0
    assert all(text == expected[question] for question, text in answers)


def test_streams_of_one_engine_can_be_read_in_turn(catalog: Catalog, nodes: list[Any]) -> None:
    asked = engine(catalog, nodes, streaming=True)
    expected = [str(engine(catalog, nodes).query(question)) for question in QUESTIONS]

    async def read_slowly(question: str) -> str:
        text = ""
        async for piece in (await asked.aquery(question)).async_response_gen():
            text += piece
            await asyncio.sleep(0.01)
        return text

    async def read_all() -> list[str]:
        return await asyncio.gather(*map(read_slowly, QUESTIONS))

    assert asyncio.run(read_all()) == expected
    assert asyncio.run(read_all()) == expected


def test_a_catalog_that_is_deleted_counts_as_missing(tmp_path: Path) -> None:
    catalog = make_catalog(tmp_path / "c", loaded("llama"))
    asked = engine(catalog, archived_nodes(catalog), max_new_tokens=2)
    asked.query(QUESTION)
    shutil.rmtree(catalog.path)
    assert asked.query(QUESTION).metadata["ragkv"]["on_missing"]["prefilled"] == 2
