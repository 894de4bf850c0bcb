"""The model as an LLM: plain, it is the stock model; over archives, it is `ask`."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from llama_index.core.base.llms.types import ChatMessage, CompletionResponse
from llama_index.core.query_engine import RetrieverQueryEngine
from transformers import PreTrainedTokenizerFast

from ragkv import LoadedModel, attach
from ragkv.answer.ask import ask
from ragkv.catalog.catalog import Catalog
from ragkv.errors import ConfigError
from ragkv.llamaindex import DOCUMENT_KEY, RagKVLLM
from ragkv.recall.composition import Composition
from ragkv.recall.prefilled import prefill_document
from tests.archives import loaded
from tests.llamaindex_helpers import (
    N_NEW,
    QUESTION,
    TEXTS,
    archived_nodes,
    fresh,
    hooked,
    make_catalog,
    retriever_of,
    saying,
)
from tests.tiny import BOS, BOS_ID, tiny_model

pytestmark = pytest.mark.timeout(60)
PROMPT = "The keeper of the lighthouse wrote"


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    return make_catalog(tmp_path_factory.mktemp("llm") / "c", loaded("llama"))


@pytest.fixture(scope="module")
def composition(catalog: Catalog) -> Composition:
    return Composition([catalog.archive(node.metadata[DOCUMENT_KEY]) for node in archived_nodes(catalog)])


@pytest.fixture(scope="module")
def plain() -> RagKVLLM:
    return RagKVLLM(loaded("llama"), max_new_tokens=N_NEW)


@pytest.fixture(params=["plain", "archives"])
def llm(request: pytest.FixtureRequest, plain: RagKVLLM, composition: Composition) -> RagKVLLM:
    return plain if request.param == "plain" else RagKVLLM(loaded("llama"), source=composition, max_new_tokens=N_NEW)


def test_without_a_source_it_is_the_stock_model(plain: RagKVLLM) -> None:
    stock, tokenizer = tiny_model("llama"), loaded("llama").tokenizer
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    out = stock.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=N_NEW, do_sample=False)
    expected = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).strip()
    completion = plain.complete(PROMPT)
    assert completion.text == expected != ""
    usage = completion.raw["usage"]
    assert usage["prompt_tokens"] == usage["prompt_tokens_prefilled"] == ids.shape[1]
    assert usage["prompt_tokens_from_archives"] == 0
    assert usage["completion_tokens"] == out.shape[1] - ids.shape[1]
    assert completion.raw["ragkv"]["ttft_s"] > 0


def test_over_archives_it_is_ask(composition: Composition) -> None:
    one = composition.documents[0]
    for source in (one, composition):
        answer = ask(source, QUESTION, max_new_tokens=N_NEW, budget=8)
        llm = RagKVLLM(loaded("llama"), source=source, max_new_tokens=N_NEW, budget=8, evidence=True)
        completion = llm.complete(QUESTION)
        assert completion.text == answer.text
        assert completion.raw["usage"]["prompt_tokens_from_archives"] == answer.archive_tokens
        assert completion.raw["usage"]["prompt_tokens_prefilled"] == answer.prefilled_tokens
        assert completion.additional_kwargs["prompt_tokens"] == answer.archive_tokens + answer.prefilled_tokens
        assert completion.raw["ragkv"]["recalled_tokens"] == answer.recalled_tokens
        assert len(completion.raw["ragkv"]["evidence"]) == len(Composition.of(source).documents)


def test_a_prefilled_document_of_a_source_counts_as_prefilled(composition: Composition) -> None:
    model, archive = loaded("llama"), composition.documents[0]
    prefilled = prefill_document(model, "A new report.", layout=archive.layout)
    usage = RagKVLLM(model, source=Composition([prefilled, archive])).complete(QUESTION).raw["usage"]
    answer = ask(Composition([prefilled, archive]), QUESTION)
    assert usage["prompt_tokens_prefilled"] == answer.prefilled_tokens + prefilled.n_tokens
    assert usage["prompt_tokens_from_archives"] == archive.n_tokens - archive.prefix_tokens
    assert usage["prompt_tokens"] == answer.prefilled_tokens + answer.archive_tokens


def test_a_stream_grows_to_the_completion(llm: RagKVLLM) -> None:
    expected = llm.complete(PROMPT)
    responses = list(llm.stream_complete(PROMPT))
    check_stream(responses, expected)
    assert asyncio.run(llm.acomplete(PROMPT)).text == expected.text

    async def streamed() -> list[CompletionResponse]:
        return [response async for response in await llm.astream_complete(PROMPT)]

    check_stream(asyncio.run(streamed()), expected)


def check_stream(responses: list[CompletionResponse], expected: CompletionResponse) -> None:
    assert "".join(response.delta or "" for response in responses) == expected.text == responses[-1].text
    so_far = ""
    for response in responses[:-1]:
        so_far += response.delta or ""
        assert response.text == so_far
        assert response.raw is None
    assert responses[-1].raw["usage"] == expected.raw["usage"]
    assert responses[-1].additional_kwargs == expected.additional_kwargs


def test_chat_goes_through_the_messages_prompt(llm: RagKVLLM) -> None:
    messages = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Who?")]
    expected = llm.complete(llm.messages_to_prompt(messages), formatted=True)

    async def streamed() -> list[Any]:
        return [response async for response in await llm.astream_chat(messages)]

    for response in (
        llm.chat(messages),
        asyncio.run(llm.achat(messages)),
        list(llm.stream_chat(messages))[-1],
        asyncio.run(streamed())[-1],
    ):
        assert response.message.content == expected.text
        assert response.raw["usage"] == expected.raw["usage"]


def test_a_prompt_can_be_dressed(plain: RagKVLLM) -> None:
    dressed = RagKVLLM(loaded("llama"), max_new_tokens=N_NEW, completion_to_prompt=lambda prompt: f"The {prompt}")
    assert dressed.complete(PROMPT[4:]).text == plain.complete(PROMPT).text
    assert dressed.complete(PROMPT, formatted=True).text == plain.complete(PROMPT).text


def test_metadata_tells_the_room_for_a_prompt(plain: RagKVLLM, composition: Composition) -> None:
    over = RagKVLLM(loaded("llama"), source=composition)
    assert plain.metadata.context_window == 4096
    assert over.metadata.context_window == 4096 - composition.n_tokens
    assert (plain.metadata.num_output, over.metadata.num_output) == (N_NEW, 64)
    assert plain.metadata.model_name == "tiny-llama"
    assert plain.to_payload()["class_name"] == "RagKVLLM"


@pytest.mark.parametrize("streaming", [False, True])
def test_a_completion_ends_at_a_stop_string(streaming: bool) -> None:
    model = fresh()
    llm = RagKVLLM(model, stop=["\n\n", "END"])
    with saying(model, "one two END three"):
        text = list(llm.stream_complete(PROMPT))[-1].text if streaming else llm.complete(PROMPT).text
    assert text == "one two"


@pytest.mark.parametrize("prompt", [PROMPT, BOS + PROMPT])
def test_a_prompt_has_one_bos(prompt: str, bos_tokenizer: PreTrainedTokenizerFast) -> None:
    model = LoadedModel(model=attach(tiny_model("llama")), tokenizer=bos_tokenizer, name="bos")
    seen: list[list[int]] = []

    def note(_module: object, _args: object, named: dict[str, Any]) -> None:
        seen.append(named["input_ids"][0].tolist())

    handle = model.model.get_decoder().register_forward_pre_hook(note, with_kwargs=True)
    RagKVLLM(model, max_new_tokens=1).complete(prompt)
    handle.remove()
    assert seen[0] == bos_tokenizer(PROMPT)["input_ids"]
    assert seen[0].count(BOS_ID) == 1


def test_it_is_the_baseline_of_a_stock_engine(catalog: Catalog) -> None:
    model = fresh()
    retriever = retriever_of(archived_nodes(catalog), top_k=2)
    engine = RetrieverQueryEngine.from_args(retriever, llm=RagKVLLM(model, max_new_tokens=N_NEW))
    with hooked(model, lambda _call: None) as calls, saying(model, "Agnes Moore"):
        response = engine.query(QUESTION)
    assert response.response == "Agnes Moore"
    assert len(response.source_nodes) == 2
    assert calls


def test_a_model_that_is_not_attached_still_completes(plain: RagKVLLM) -> None:
    stock = LoadedModel(model=tiny_model("llama"), tokenizer=loaded("llama").tokenizer, name="stock")
    assert RagKVLLM(stock, max_new_tokens=N_NEW).complete(PROMPT).text == plain.complete(PROMPT).text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 4}, "give a source"),
        ({"evidence": True}, "give a source"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RagKVLLM(loaded("llama"), **options)


def test_a_source_of_another_model_and_stop_strings_with_a_source_are_refused(composition: Composition) -> None:
    with pytest.raises(ConfigError, match="another model object"):
        RagKVLLM(fresh(), source=composition)
    with pytest.raises(ConfigError, match="layout says"):
        RagKVLLM(loaded("llama"), source=composition, stop=["."])


def test_prompts_that_cannot_be_answered_are_refused(plain: RagKVLLM) -> None:
    with pytest.raises(ConfigError, match="prompt is empty"):
        plain.complete("")
    with pytest.raises(ConfigError, match=r"context holds 4,096"):
        list(plain.stream_complete(TEXTS[0] * 40))
    with pytest.raises(ConfigError, match="temperature"):
        plain.complete(PROMPT, temperature=0.5)
