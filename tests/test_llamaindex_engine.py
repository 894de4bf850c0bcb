"""The query engine answers as `ask` does over the same archives, in every way of asking."""

from __future__ import annotations

import asyncio
import inspect
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.base.response.schema import AsyncStreamingResponse, Response, StreamingResponse
from llama_index.core.bridge.pydantic import Field
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler, TokenCountingHandler
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.postprocessor import SimilarityPostprocessor
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import QueryBundle

from ragkv.answer.ask import ask
from ragkv.catalog.catalog import Catalog
from ragkv.errors import ConfigError
from ragkv.llamaindex import RagKVQueryEngine, RagKVSynthesizer
from ragkv.llamaindex.options import AnswerOptions
from ragkv.model.prompt import PromptLayout, question_ids
from ragkv.recall.recompute import recompute
from ragkv.recipe import RecallPolicy
from tests.archives import SMALL, loaded
from tests.llamaindex_helpers import (
    N_NEW,
    NAMES,
    QUESTION,
    archived_nodes,
    composition_of,
    make_catalog,
    retriever_of,
)

pytestmark = pytest.mark.timeout(60)
EMPTY = "Empty Response"


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    return make_catalog(tmp_path_factory.mktemp("engine") / "c", loaded("llama"))


@pytest.fixture(scope="module")
def retriever(catalog: Catalog) -> Any:
    return retriever_of(archived_nodes(catalog))


def engine(retriever: Any, catalog: Catalog, **options: Any) -> RagKVQueryEngine:
    return RagKVQueryEngine.from_args(retriever, catalog, **{"max_new_tokens": N_NEW, **options})


def test_an_answer_is_that_of_ask_over_the_same_archives(catalog: Catalog, retriever: Any) -> None:
    response = engine(retriever, catalog).query(QUESTION)
    answer = ask(composition_of(catalog, response.source_nodes), QUESTION, max_new_tokens=N_NEW, evidence=True)
    report = response.metadata["ragkv"]
    assert isinstance(response, Response)
    assert response.response == answer.text != ""
    assert report["recalled_tokens"] == answer.recalled_tokens
    assert report["unrecalled_mass"] == answer.unrecalled_mass
    assert report["kv_bytes"]["archive"] == answer.kv_bytes.archive
    assert [each["share"] for each in report["evidence"]] == [each.share for each in answer.evidence]


def test_source_nodes_have_their_scores_and_metadata(catalog: Catalog, retriever: Any) -> None:
    response = engine(retriever, catalog).query(QUESTION)
    found = retriever.retrieve(QUESTION)
    assert [(each.node_id, each.score) for each in response.source_nodes] == [(e.node_id, e.score) for e in found]
    assert found[0].node_id == "node-0"
    assert all(response.metadata[each.node_id] == each.node.metadata for each in found)


def test_only_the_question_is_prefilled(catalog: Catalog, retriever: Any) -> None:
    report = engine(retriever, catalog).query(QUESTION).metadata["ragkv"]
    asked = len(question_ids(loaded("llama").tokenizer, catalog.layout, QUESTION))
    prefix = catalog.archive(report["documents"][0]["id"]).prefix_tokens
    kept = prefix + sum(document["tokens"] for document in report["documents"])
    assert report["usage"]["prompt_tokens_prefilled"] == asked
    assert report["usage"]["prompt_tokens_from_archives"] == kept
    assert report["usage"]["prompt_tokens"] == asked + kept
    assert 1 <= report["usage"]["completion_tokens"] <= N_NEW
    assert report["on_missing"] == {"policy": "prefill", "served": 2, "prefilled": 0, "built": 0, "reasons": {}}


def test_evidence_names_documents_and_their_text(catalog: Catalog, retriever: Any) -> None:
    report = engine(retriever, catalog).query(QUESTION).metadata["ragkv"]
    assert [each["id"] for each in report["evidence"]] == [each["id"] for each in report["documents"]]
    assert {each["document"] for each in report["evidence"]} <= set(NAMES)
    for found in report["evidence"]:
        text = catalog.archive(found["id"]).text
        assert found["passages"]
        assert all(text[each["start"] : each["end"]] == each["text"] for each in found["passages"])
    assert sum(each["share"] for each in report["evidence"]) == pytest.approx(1.0)
    assert engine(retriever, catalog, evidence=False).query(QUESTION).metadata["ragkv"]["evidence"] == []


def test_the_report_is_plain_json(catalog: Catalog, retriever: Any) -> None:
    report = engine(retriever, catalog).query(QUESTION).metadata["ragkv"]
    assert json.loads(json.dumps(report)) == report
    assert report["ttft_s"] > 0
    assert report["resolve_s"] > 0


def test_async_equals_sync(catalog: Catalog, retriever: Any) -> None:
    asked = engine(retriever, catalog)
    expected, response = asked.query(QUESTION), asyncio.run(asked.aquery(QUESTION))
    assert response.response == expected.response
    assert [each.node_id for each in response.source_nodes] == [each.node_id for each in expected.source_nodes]
    assert response.metadata["ragkv"]["usage"] == expected.metadata["ragkv"]["usage"]


def test_a_stream_equals_the_answer_and_fills_its_metadata_at_the_end(catalog: Catalog, retriever: Any) -> None:
    expected = engine(retriever, catalog).query(QUESTION)
    response = engine(retriever, catalog, streaming=True).query(QUESTION)
    assert isinstance(response, StreamingResponse)
    assert set(response.metadata["ragkv"]) == {"documents", "on_missing", "resolve_s"}
    held = response.metadata
    assert "".join(response.response_gen) == expected.response
    assert set(held["ragkv"]) == set(expected.metadata["ragkv"])
    assert held["ragkv"]["usage"] == expected.metadata["ragkv"]["usage"]
    assert [each.score for each in response.source_nodes] == [each.score for each in expected.source_nodes]


def test_an_async_stream_equals_the_answer(catalog: Catalog, retriever: Any) -> None:
    expected = engine(retriever, catalog).query(QUESTION)

    async def streamed() -> tuple[str, AsyncStreamingResponse]:
        response = await engine(retriever, catalog, streaming=True).aquery(QUESTION)
        assert isinstance(response, AsyncStreamingResponse)
        return "".join([piece async for piece in response.async_response_gen()]), response

    text, response = asyncio.run(streamed())
    assert text == expected.response
    assert response.metadata["ragkv"]["usage"] == expected.metadata["ragkv"]["usage"]
    assert len(response.source_nodes) == 2


def test_the_synthesizer_serves_an_engine_of_llama_index(catalog: Catalog, retriever: Any) -> None:
    synthesizer = RagKVSynthesizer(catalog, max_new_tokens=N_NEW)
    stock = RetrieverQueryEngine(retriever, response_synthesizer=synthesizer)
    expected = engine(retriever, catalog).query(QUESTION).response
    assert stock.query(QUESTION).response == expected
    assert asyncio.run(stock.aquery(QUESTION)).response == expected


def test_texts_without_nodes_are_answered_from_their_archives(catalog: Catalog, retriever: Any) -> None:
    texts = [each.node.get_content() for each in retriever.retrieve(QUESTION)]
    expected = engine(retriever, catalog).query(QUESTION).response
    synthesizer = RagKVSynthesizer(catalog, max_new_tokens=N_NEW, on_missing="raise")
    assert synthesizer.get_response(QUESTION, texts) == expected
    assert asyncio.run(synthesizer.aget_response(QUESTION, texts)) == expected
    streaming = RagKVSynthesizer(catalog, max_new_tokens=N_NEW, streaming=True)
    assert "".join(streaming.get_response(QUESTION, texts)) == expected


def test_the_best_document_stands_first_or_last(catalog: Catalog, retriever: Any) -> None:
    first, last = (engine(retriever, catalog, best_last=way).query(QUESTION) for way in (False, True))
    ids = [each["id"] for each in first.metadata["ragkv"]["documents"]]
    assert [each["id"] for each in last.metadata["ragkv"]["documents"]] == ids[::-1]
    assert [each["id"] for each in last.metadata["ragkv"]["evidence"]] == ids[::-1]
    assert ids[0] == first.source_nodes[0].node.metadata["ragkv_document"]
    answer = ask(composition_of(catalog, last.source_nodes[::-1]), QUESTION, max_new_tokens=N_NEW)
    assert last.response == answer.text


def test_options_reach_recall(catalog: Catalog, retriever: Any) -> None:
    tight = engine(retriever, catalog, budget=4, positions="reused").query(QUESTION)
    wide = engine(retriever, catalog, policy=RecallPolicy(budget=1 << 20)).query(QUESTION)
    assert tight.metadata["ragkv"]["recalled_tokens"] < wide.metadata["ragkv"]["recalled_tokens"]
    assert wide.metadata["ragkv"]["unrecalled_mass"] == 0.0
    short = engine(retriever, catalog, max_new_tokens=2).query(QUESTION)
    assert short.metadata["ragkv"]["usage"]["completion_tokens"] <= 2


def test_no_hits_give_the_empty_response(catalog: Catalog, retriever: Any) -> None:
    nothing = [SimilarityPostprocessor(similarity_cutoff=1.5)]
    plain = engine(retriever, catalog, node_postprocessors=nothing)
    streamed = engine(retriever, catalog, node_postprocessors=nothing, streaming=True)

    async def collected() -> str:
        return "".join([piece async for piece in (await streamed.aquery(QUESTION)).response_gen])

    assert plain.query(QUESTION).response == asyncio.run(plain.aquery(QUESTION)).response == EMPTY
    assert "".join(streamed.query(QUESTION).response_gen) == asyncio.run(collected()) == EMPTY
    assert plain.query(QUESTION).source_nodes == []
    assert engine(retriever, catalog, node_postprocessors=nothing, empty_response="-").query(QUESTION).response == "-"


def test_retrieve_applies_the_postprocessors(catalog: Catalog, retriever: Any) -> None:
    found = retriever.retrieve(QUESTION)
    cutoff = (found[0].score + found[1].score) / 2
    asked = engine(retriever, catalog, node_postprocessors=[SimilarityPostprocessor(similarity_cutoff=cutoff)])
    assert [each.node_id for each in asked.retrieve(QueryBundle(QUESTION))] == ["node-0"]
    assert len(asked.query(QUESTION).metadata["ragkv"]["documents"]) == 1


def test_a_sync_query_works_inside_a_running_loop(catalog: Catalog, retriever: Any) -> None:
    async def notebook() -> tuple[str, str]:
        streamed = engine(retriever, catalog, streaming=True).query(QUESTION)
        return engine(retriever, catalog).query(QUESTION).response, str(streamed)

    answer, streamed = asyncio.run(notebook())
    assert answer == streamed == engine(retriever, catalog).query(QUESTION).response


def test_threads_that_ask_at_once_get_the_serial_answers(catalog: Catalog, retriever: Any) -> None:
    asked = engine(retriever, catalog)
    questions = [f"Who wrote name number {number} in the book of ships?" for number in range(8)]
    expected = [asked.query(question).response for question in questions]
    with ThreadPoolExecutor(8) as pool:
        assert [each.response for each in pool.map(asked.query, questions)] == expected


class Seen(BaseEventHandler):
    """Remembers the events of one test."""

    events: list[BaseEvent] = Field(default_factory=list)

    @classmethod
    def class_name(cls) -> str:
        return "Seen"

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        self.events.append(event)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
def test_event_handlers_see_query_synthesis_and_model(
    catalog: Catalog, retriever: Any, streaming: bool, is_async: bool
) -> None:
    root, seen = get_dispatcher(), Seen()
    asked = engine(retriever, catalog, streaming=streaming)

    async def streamed() -> None:
        response = await asked.aquery(QUESTION)
        if streaming:
            assert [piece async for piece in response.response_gen]

    root.add_event_handler(seen)
    try:
        if is_async:
            asyncio.run(streamed())
        else:
            str(asked.query(QUESTION))
    finally:
        root.event_handlers.remove(seen)
    names = [event.class_name() for event in seen.events]
    for name in ("Query", "Synthesize", "LLMCompletion"):
        assert names.count(f"{name}StartEvent") == names.count(f"{name}EndEvent") == 1, names
    order = [name for name in names if name in ("QueryStartEvent", "SynthesizeStartEvent", "SynthesizeEndEvent")]
    assert order == ["QueryStartEvent", "SynthesizeStartEvent", "SynthesizeEndEvent"]
    ended = next(event for event in seen.events if event.class_name() == "LLMCompletionEndEvent")
    assert ended.response.raw["usage"]["prompt_tokens_from_archives"] > 0


@pytest.mark.parametrize("streaming", [False, True])
def test_callback_handlers_count_the_tokens(catalog: Catalog, retriever: Any, streaming: bool) -> None:
    counter, debug = TokenCountingHandler(tokenizer=lambda text: [0]), LlamaDebugHandler(print_trace_on_end=False)
    manager = CallbackManager([counter, debug])
    response = engine(retriever, catalog, streaming=streaming, callback_manager=manager).query(QUESTION)
    str(response)
    usage = response.metadata["ragkv"]["usage"]
    assert counter.prompt_llm_token_count == usage["prompt_tokens"]
    assert counter.completion_llm_token_count == usage["completion_tokens"]
    for kind in (CBEventType.QUERY, CBEventType.SYNTHESIZE, CBEventType.LLM):
        assert len(debug.get_event_pairs(kind)) == 1


@pytest.mark.parametrize(
    "options",
    [{"on_missing": "skip"}, {"positions": "any"}, {"budget": 0}, {"max_new_tokens": 0}],
    ids=lambda options: next(iter(options)),
)
def test_options_out_of_range_are_refused_at_once(catalog: Catalog, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        RagKVSynthesizer(catalog, **options)


@pytest.mark.parametrize("taker", [RagKVSynthesizer, RagKVQueryEngine.from_args])
def test_every_option_stands_in_the_signature_with_its_default(taker: Any) -> None:
    shown = inspect.signature(taker).parameters
    assert {name: each.default for name, each in shown.items() if each.kind == each.KEYWORD_ONLY}.items() >= {
        each.name: each.default for each in fields(AnswerOptions)
    }.items()
    assert {"streaming", "empty_response", "callback_manager"} <= shown.keys()
    assert "options" not in shown


def test_an_option_that_does_not_exist_is_refused(catalog: Catalog, retriever: Any) -> None:
    with pytest.raises(TypeError, match="budgte"):
        engine(retriever, catalog, budgte=3)


def test_an_engine_over_another_retriever_answers_with_the_same_options(catalog: Catalog, retriever: Any) -> None:
    first = engine(retriever, catalog, max_new_tokens=3)
    other = retriever_of(archived_nodes(catalog), top_k=1)
    second = first.with_retriever(other)
    assert isinstance(first, RetrieverQueryEngine)
    assert type(second) is RagKVQueryEngine
    assert (first.retriever, second.retriever) == (retriever, other)
    usage = asyncio.run(second.aquery(QUESTION)).metadata["ragkv"]["usage"]
    assert 1 <= usage["completion_tokens"] <= 3


def test_a_catalog_without_its_model_is_refused(catalog: Catalog) -> None:
    with pytest.raises(ConfigError, match="opened without a model"):
        RagKVSynthesizer(Catalog.open(catalog.path))


def test_an_empty_question_and_unknown_options_are_refused(catalog: Catalog, retriever: Any) -> None:
    with pytest.raises(ConfigError, match="question is empty"):
        engine(retriever, catalog).synthesize(QueryBundle("  "), retriever.retrieve(QUESTION))
    with pytest.raises(ConfigError, match="verbose"):
        RagKVSynthesizer(catalog).synthesize(QUESTION, retriever.retrieve(QUESTION), verbose=True)
    with pytest.raises(ConfigError, match="layout"):
        RagKVSynthesizer(catalog).update_prompts({"text_qa_template": None})


def test_a_query_changes_nothing_in_the_catalog(catalog: Catalog, retriever: Any) -> None:
    def listing(folder: Path) -> list[tuple[str, int]]:
        return sorted((str(path), path.stat().st_mtime_ns) for path in folder.rglob("*"))

    before = listing(catalog.path)
    engine(retriever, catalog).query(QUESTION)
    assert listing(catalog.path) == before


def test_recomputed_tokens_are_part_of_the_answer_and_of_the_count(tmp_path: Path) -> None:
    model = loaded("llama")
    recipe = replace(SMALL, sink_tokens=40)
    own = Catalog.create(tmp_path / "c", model, layout=PromptLayout.plain(), recipe=recipe)
    retriever = retriever_of(archived_nodes(own))
    plain = engine(retriever, own).query(QUESTION).metadata["ragkv"]["usage"]
    response = engine(retriever, own, recompute_tokens=6).query(QUESTION)
    usage = response.metadata["ragkv"]["usage"]
    assert usage["prompt_tokens_prefilled"] == plain["prompt_tokens_prefilled"] + 6
    assert usage["prompt_tokens_from_archives"] == plain["prompt_tokens_from_archives"] - 6
    composition = recompute(composition_of(own, response.source_nodes), 6)
    assert str(response) == ask(composition, QUESTION, max_new_tokens=N_NEW).text
