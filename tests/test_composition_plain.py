"""The plain prompt that compositions are compared with is what LlamaIndex's own query engine reads."""

from __future__ import annotations

import pytest
import torch
from llama_index.core.schema import TextNode

from pipelines.measure.plain import PlainPrompt
from pipelines.query_engine import plain_engine
from ragkv.model.prompt import PromptLayout
from tests.archives import DOCUMENT, QUESTIONS, loaded

TEXTS = (DOCUMENT[:400], " Agnes Moore kept the lighthouse.\n", DOCUMENT[400:900])
N_NEW = 12


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3"])
def test_answers_are_those_of_llamaindex(name: str) -> None:
    model, layout = loaded(name), PromptLayout.plain()
    plain = PlainPrompt(model, layout, TEXTS)
    engine = plain_engine(model, [TextNode(text=text) for text in TEXTS], layout=layout, max_new_tokens=N_NEW)
    for question in QUESTIONS:
        assert plain.decode(question, max_new_tokens=N_NEW).text == str(engine.query(question).get_response())


@torch.no_grad()
def test_questions_share_a_prefill_and_get_the_logits_of_the_whole_prompt() -> None:
    model, layout = loaded("llama"), PromptLayout.plain()
    plain = PlainPrompt(model, layout, TEXTS)
    for question in QUESTIONS:
        ids = plain.ids(question)
        expected = model.model(torch.tensor([ids])).logits[0, -1]
        found = plain.decode(question, max_new_tokens=1).logits[0]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
        assert plain.prefill_s > 0
