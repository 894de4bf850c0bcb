"""The measures of fidelity and time, on values that can be worked out by hand."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest
import torch

from ragkv.errors import ConfigError
from ragkv.evaluation.bench import BenchOptions, bench, cut_text
from ragkv.evaluation.data.own_questions import quotation_questions
from ragkv.evaluation.data.reference_text import default_text
from ragkv.evaluation.fidelity import agreement, kl_divergence, measure_fidelity
from ragkv.evaluation.timing import Times, interleaved, memory_peak
from ragkv.model.prefill import prefill_cache
from ragkv.model.prompt import PromptLayout, tokenize_prompt
from tests.archives import DOCUMENT, EVERYTHING, QUESTIONS, SMALL, archive_of, loaded


def test_kl_divergence_by_hand() -> None:
    dense = torch.log(torch.tensor([[0.5, 0.5], [0.9, 0.1]]))
    other = torch.log(torch.tensor([[0.25, 0.75], [0.9, 0.1]]))
    expected = [0.5 * math.log(2) + 0.5 * math.log(2 / 3), 0.0]
    torch.testing.assert_close(kl_divergence(dense, other), torch.tensor(expected), atol=1e-6, rtol=0)


def test_agreement_takes_either_of_two_equal_best_tokens() -> None:
    dense = torch.tensor([[1.0, 3.0, 3.0], [1.0, 3.0, 2.0], [5.0, 1.0, 1.0]])
    other = torch.tensor([[0.0, 0.0, 9.0], [0.0, 0.0, 9.0], [9.0, 0.0, 0.0]])
    assert agreement(dense, other).tolist() == [1.0, 0.0, 1.0]


def test_kl_divergence_does_not_see_a_constant_added_to_logits() -> None:
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(kl_divergence(logits, logits + 5), torch.zeros(3), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_everything_recalled_has_no_divergence_and_little_has_some(tmp_path: Path, name: str) -> None:
    archive = archive_of(tmp_path / "a", model=name)
    dense = prefill_cache(archive.model.model, archive.tokens.ids.tolist())
    everything = measure_fidelity(archive, dense, QUESTIONS, budget=EVERYTHING, max_new_tokens=6)
    little = measure_fidelity(archive, dense, QUESTIONS, budget=1, max_new_tokens=6)
    assert everything.kl < 1e-6
    assert everything.top1 == 1.0
    assert little.kl > 10 * everything.kl
    assert dense.get_seq_length() == archive.n_tokens, "the dense cache must not be changed"
    assert everything.n_questions == len(QUESTIONS)


def test_times_are_median_and_tail() -> None:
    times = Times.of([0.04, 0.01, 0.02, 0.03, 0.05])
    assert (times.median, times.n) == (pytest.approx(0.03), 5)
    assert times.median < times.p90 < times.p99 <= 0.05


def test_interleaved_times_each_call_once_a_round_and_drops_the_warm_up() -> None:
    order: list[str] = []
    times = interleaved(
        {"a": lambda: lambda: order.append("a"), "b": lambda: lambda: order.append("b")}, 2, torch.device("cpu")
    )
    assert order == ["a", "b"] * 3
    assert times["a"].n == 2


def test_memory_peak_sees_what_a_block_allocates() -> None:
    with memory_peak(torch.device("cpu")) as peak:
        held = torch.ones(64 << 20, dtype=torch.uint8)
        time.sleep(0.2)
    assert peak.bytes > 48 << 20
    del held


def test_cut_text_gives_the_length_asked_for() -> None:
    model = loaded("llama")
    layout = PromptLayout.plain()
    tokens = tokenize_prompt(model.tokenizer, layout, cut_text(model, layout, DOCUMENT, 500))
    assert len(tokens.prefix_ids) + len(tokens.document_ids) == 500


def test_a_text_too_short_is_refused() -> None:
    with pytest.raises(ConfigError, match="100000 tokens are asked for and the text has"):
        cut_text(loaded("llama"), PromptLayout.plain(), DOCUMENT, 100_000)


def test_bench_counts_bytes_as_the_archive_does() -> None:
    options = BenchOptions(text=DOCUMENT, questions=QUESTIONS, recipe=SMALL, layout=PromptLayout.plain(), steps=2)
    run = bench(loaded("llama"), 600, options)
    # 3 layers x 2 KV heads x 16 dimensions x keys and values x 2 bytes
    assert run.bytes["dense_bf16"] == 600 * 3 * 2 * 16 * 2 * 2
    assert run.ratios["disk_over_dense"] == run.bytes["disk"] / run.bytes["dense_bf16"]
    assert run.ratios["build_over_prefill"] == pytest.approx(run.times["build_s"] / run.times["prefill_s"])


def test_the_default_text_is_long_and_has_sentences_to_continue() -> None:
    text = default_text()
    questions = quotation_questions(text[:30_000])
    assert len(text) > 200_000
    assert len(set(questions)) == 24
    plain = " ".join(text.split())
    for question in questions:
        opening = question.split('begins "', 1)[1][:-2]
        assert opening in plain
        assert len(opening.split()) == 8


def test_a_text_without_sentences_wants_questions() -> None:
    with pytest.raises(ConfigError, match="give --questions"):
        quotation_questions("one two three. " * 100)
