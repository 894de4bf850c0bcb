"""Comparison policies: exact where they keep everything, and true to what each of them is said to do."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Cache, DynamicCache, PreTrainedModel

from ragkv.build.layer import Span, document_span
from ragkv.build.probes import probe_ids
from ragkv.errors import ConfigError
from ragkv.evaluation.fidelity import kl_divergence
from ragkv.evaluation.peers import selection as peer_selection
from ragkv.evaluation.peers.policies import (
    PEERS,
    PeerCache,
    PeerPolicy,
    PreparedPeer,
    SelectedLayer,
    prepare,
)
from ragkv.evaluation.peers.quantise import Codes
from ragkv.evaluation.peers.selection import (
    ClusterSelection,
    FixedSelection,
    OracleSelection,
    PageSelection,
    RowBlock,
    attend_selected,
)
from ragkv.model.attention import AttentionCall, causal_mask, dense_attention
from ragkv.model.prefill import prefill_cache
from ragkv.model.prompt import PromptLayout, question_ids, tokenize_prompt
from ragkv.recipe import QUESTION_SHARE
from tests.archives import DOCUMENT, EVERYTHING, QUESTIONS, SMALL, loaded
from tests.tiny import tiny_model

MODELS = ("llama", "qwen2", "gemma2", "gemma3", "gpt_oss")
DROPPING = tuple(name for name in PEERS if not name.startswith("quantised"))
ANSWER = (40, 77, 130)
LAYOUT = PromptLayout.plain()


@dataclass(frozen=True)
class Subject:
    """A prefilled document; the dense cache is shared, so no test may change it."""

    model: PreTrainedModel
    dense: DynamicCache
    span: Span
    probes: tuple[int, ...]

    def prepare(self, name: str, **parameters: int | str) -> PreparedPeer:
        policy = PeerPolicy(name=name, **parameters)
        return prepare(policy, self.dense, self.span, model=self.model, probes=self.probes)

    def logits(self, cache: Cache, question: str = QUESTIONS[1]) -> torch.Tensor:
        """(1 + len(ANSWER), vocab): a question, then forced answer tokens one at a time."""
        ids = question_ids(loaded("llama").tokenizer, LAYOUT, question)
        end, rows = self.span.end, []
        with torch.no_grad():
            for step in (ids, *([token] for token in ANSWER)):
                position = torch.arange(end, end + len(step)).unsqueeze(0)
                rows.append(self.model(torch.tensor([step]), position_ids=position, cache=cache).logits[0, -1])
                end += len(step)
        return torch.stack(rows)

    def kl(self, prepared: PreparedPeer) -> float:
        dense = self.logits(copy.deepcopy(self.dense))
        return float(kl_divergence(dense, self.logits(PeerCache(self.dense, prepared))).mean())


@lru_cache(maxsize=8)
def subject(name: str) -> Subject:
    model = loaded(name)
    tokens = tokenize_prompt(model.tokenizer, LAYOUT, DOCUMENT[:1400])
    dense = prefill_cache(model.model, (*tokens.prefix_ids, *tokens.document_ids))
    probes = probe_ids(model.tokenizer, LAYOUT, tokens.document_ids)
    return Subject(model.model, dense, document_span(tokens, SMALL), tuple(probes))


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def drawn_call(*, rows: int = 7, keys: int = 60, sinks: bool = True) -> AttentionCall:
    """4 query heads over 2 KV heads, with a softcap."""
    query, key, value = drawn(1, 4, rows, 8), drawn(1, 2, keys, 8, seed=1), drawn(1, 2, keys, 6, seed=2)
    return AttentionCall(
        query * 2, key, value, mask=None, scaling=0.5, softcap=9.0, sinks=drawn(4, seed=3) if sinks else None
    )


# Exact where nothing is left out


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("policy", DROPPING)
def test_a_budget_of_the_whole_document_gives_the_dense_logits(model: str, policy: str) -> None:
    here = subject(model)
    found = here.logits(PeerCache(here.dense, here.prepare(policy, budget=EVERYTHING)))
    torch.testing.assert_close(found, here.logits(copy.deepcopy(here.dense)), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("policy", PEERS)
def test_a_small_budget_changes_the_answer_and_never_the_dense_cache(policy: str) -> None:
    here = subject("gemma3")
    before = [(layer.keys.clone(), layer.values.clone()) for layer in here.dense.layers]
    assert here.kl(here.prepare(policy, budget=8)) > 1e-7
    for (keys, values), layer in zip(before, here.dense.layers, strict=True):
        assert torch.equal(keys, layer.keys)
        assert torch.equal(values, layer.values)


def test_dropping_equals_dense_attention_over_the_tokens_that_are_left() -> None:
    call, span = drawn_call(), Span(head=5, tail=45, end=50)
    kept = torch.zeros(40, dtype=torch.bool).index_fill_(0, torch.tensor([3, 17, 18, 39]), True)
    found, attended = attend_selected(call, FixedSelection(kept.expand(2, -1)), 1, span=span)
    left = torch.cat([torch.ones(5, dtype=torch.bool), kept, torch.ones(15, dtype=torch.bool)])
    mask = causal_mask(call.query, call.key)[..., left]
    rest = AttentionCall(
        call.query,
        call.key[:, :, left],
        call.value[:, :, left],
        mask=mask,
        scaling=call.scaling,
        softcap=call.softcap,
        sinks=call.sinks,
    )
    torch.testing.assert_close(found, dense_attention(rest), atol=1e-6, rtol=1e-5)
    assert attended.tolist() == [[4] * 7] * 2


@pytest.mark.parametrize("sinks", [True, False])
def test_rows_in_several_blocks_equal_one_block(sinks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    call, span, selection = drawn_call(sinks=sinks), Span(head=5, tail=45, end=50), OracleSelection(80)
    whole, counts = attend_selected(call, selection, 6, span=span)
    monkeypatch.setattr(peer_selection, "_BLOCK_FLOATS", 1)
    blocks, block_counts = attend_selected(call, selection, 6, span=span)
    torch.testing.assert_close(blocks, whole, atol=1e-6, rtol=1e-5)
    assert torch.equal(counts, block_counts)


# What each policy keeps


def block_of(query: torch.Tensor, logits: torch.Tensor | None = None) -> RowBlock:
    """One KV head; query (n_rows, group, head_dim)."""
    return RowBlock(query.unsqueeze(0), torch.empty(0) if logits is None else logits.unsqueeze(0), slice(1, 4))


def test_clusters_group_by_direction_whatever_the_length() -> None:
    keys = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [9.0, 0.5], [0.2, 8.0]]])
    selection = ClusterSelection.of(keys, tokens_per_cluster=2, iterations=5, pool="max")
    labels = selection.labels[0].tolist()
    assert labels[0] == labels[2] != labels[1] == labels[3]
    assert selection.centroids[0, labels[0]].tolist() == [5.0, 0.25]


@pytest.mark.parametrize(("pool", "expected"), [("max", [1, 1, 0, 0, 0]), ("sum", [0, 0, 1, 1, 1])])
def test_whole_clusters_are_taken_by_the_pooled_score_of_the_group(pool: str, expected: list[int]) -> None:
    """Scores of two query heads: cluster 0 (6, -9), cluster 1 (4, 4), and one that is empty and would score best."""
    centroids = torch.tensor([[[6.0, -9.0], [4.0, 4.0], [99.0, 99.0]]])
    selection = ClusterSelection(torch.tensor([[0, 0, 1, 1, 1]]), centroids, torch.tensor([[2, 3, 0]]), pool)
    query = torch.eye(2).unsqueeze(0)
    assert selection.keep(block_of(query), 1).int().tolist() == [[expected]]
    assert selection.keep(block_of(query), 4).all()
    assert selection.index_values == 4


@given(seed=st.integers(0, 1000), page_tokens=st.integers(1, 9))
@settings(max_examples=30, deadline=None)
def test_the_bound_of_a_page_is_above_every_logit_in_it(seed: int, page_tokens: int) -> None:
    keys, query = drawn(2, 21, 8, seed=seed), drawn(2, 3, 2, 8, seed=seed + 1)
    selection = PageSelection.of(keys, page_tokens=page_tokens, pool="max")
    bounds = selection.bounds(query).gather(-1, selection.labels[:, None, None].expand(-1, 3, 2, -1))
    assert bool((query @ keys.unsqueeze(1).transpose(2, 3) <= bounds + 1e-4).all())
    assert int(selection.sizes.sum()) == 2 * 21


def test_pages_are_bounded_by_hand() -> None:
    keys = torch.tensor([[[1.0, -2.0], [3.0, 4.0], [-5.0, 0.0]]])
    selection = PageSelection.of(keys, page_tokens=2, pool="max")
    assert selection.minima.tolist() == [[[1.0, -2.0], [-5.0, 0.0]]]
    assert selection.maxima.tolist() == [[[3.0, 4.0], [-5.0, 0.0]]]
    # 2 x 3 + (-1) x (-2) = 8 for the first page, 2 x (-5) = -10 for the second
    assert selection.bounds(torch.tensor([[[[2.0, -1.0]]]])).tolist() == [[[[8.0, -10.0]]]]


def test_window_keeps_the_last_tokens() -> None:
    selection = FixedSelection.last(2, n_kv_heads=1, n_document=5, device=torch.device("cpu"))
    assert selection.kept.int().tolist() == [[0, 0, 0, 1, 1]]


def test_the_oracle_sums_the_mass_of_the_group_and_looks_at_the_document_alone() -> None:
    """Document tokens stand at 1..3. Mass: 0.25 + 0.06, 0.1 + 0.3 and 0.05 + 0.04; the first and last key have more."""
    weights = torch.tensor([[[0.4, 0.25, 0.1, 0.05, 0.2], [0.5, 0.06, 0.3, 0.04, 0.1]]])
    block = block_of(torch.empty(1, 2, 1), weights.log())
    assert OracleSelection(3).keep(block, 1).tolist() == [[[False, True, False]]]
    assert OracleSelection(3).keep(block, 2).tolist() == [[[True, True, False]]]


@pytest.mark.parametrize("model", MODELS)
def test_the_oracle_loses_no_more_than_any_other_way_to_drop(model: str) -> None:
    here = subject(model)
    oracle = here.kl(here.prepare("oracle", budget=48))
    assert all(oracle <= here.kl(here.prepare(name, budget=48)) for name in ("window-sinks", "eviction"))


def test_tokens_that_eviction_dropped_matter_to_no_question() -> None:
    """Per KV head exactly `budget` tokens are left; what the others hold changes no answer."""
    here = subject("gpt_oss")
    prepared, other = here.prepare("eviction", budget=20), copy.deepcopy(here.dense)
    for index, layer in prepared.layers.items():
        assert isinstance(layer, SelectedLayer)
        assert isinstance(layer.selection, FixedSelection)
        kept = layer.selection.kept
        assert kept.sum(1).tolist() == [20, 20]
        other.layers[index].values[0, :, here.span.head : here.span.tail][~kept] = 1e4
        other.layers[index].keys[0, :, here.span.head : here.span.tail][~kept] = -3.0
    for question in QUESTIONS[:2]:
        found = here.logits(PeerCache(other, prepared), question)
        assert torch.equal(found, here.logits(PeerCache(here.dense, prepared), question))


def test_eviction_keeps_what_the_probes_attend_to() -> None:
    """The first layer of a random model, with attention worked out anew from its own eager weights."""
    here = subject("llama")
    twin = copy.deepcopy(here.model)
    twin.set_attn_implementation("eager")
    positions = torch.arange(here.span.end, here.span.end + len(here.probes)).unsqueeze(0)
    ids = torch.tensor([here.probes])
    with torch.no_grad():
        seen = twin(ids, position_ids=positions, cache=copy.deepcopy(here.dense), output_attentions=True)
    first = here.prepare("eviction", budget=16).layers[0]
    assert isinstance(first, SelectedLayer)
    assert isinstance(first.selection, FixedSelection)
    mass = seen.attentions[0][0, :, :, here.span.head : here.span.tail].sum(1).view(2, 2, -1).sum(1)
    expected = mass.topk(16).indices.sort().values
    assert torch.equal(first.selection.kept.nonzero()[:, 1].view(2, 16), expected)


class BudgetNotes:
    """A layer that attends densely and notes the budget that each call was given."""

    resident_bytes = disk_bytes = 0

    def __init__(self) -> None:
        self.budgets: list[int] = []

    def attend(self, call: AttentionCall, budget: int) -> tuple[torch.Tensor, int]:
        self.budgets.append(budget)
        return dense_attention(call), 1


def test_question_tokens_get_as_many_times_the_budget_as_ragkv_gives_them() -> None:
    here, notes = short(), BudgetNotes()
    cache = PeerCache(here.dense, PreparedPeer(PeerPolicy(name="oracle", budget=20), here.span, {0: notes}))
    here.logits(cache)
    assert notes.budgets == [int(20 * QUESTION_SHARE), 20, 20, 20]
    cache = PeerCache(here.dense, PreparedPeer(PeerPolicy(name="oracle", budget=20), here.span, {0: notes}))
    here.model(torch.tensor([[5]]), position_ids=torch.tensor([[90]]), cache=cache)
    assert notes.budgets[-1] == int(20 * QUESTION_SHARE), "a question of one token is a question"


# Codes


@given(seed=st.integers(0, 1000), bits=st.sampled_from([4, 8]), bias=st.floats(-200, 200))
@settings(max_examples=30, deadline=None)
def test_codes_are_off_by_half_a_step_and_the_rounding_of_their_offset(seed: int, bits: int, bias: float) -> None:
    rows = drawn(2, 5, 16, seed=seed) * 10 + bias
    step = (rows.amax(-1, keepdim=True) - rows.amin(-1, keepdim=True)) / (2**bits - 1)
    limit = step / 2 + rows.abs().amax(-1, keepdim=True) * 2**-10
    assert bool(((Codes.of(rows, bits).decode() - rows).abs() <= limit).all())


def test_a_constant_row_keeps_its_value() -> None:
    assert torch.equal(Codes.of(torch.full((1, 1, 4), 2.5), 4).decode(), torch.full((1, 1, 4), 2.5))


@pytest.mark.parametrize("model", MODELS)
def test_eight_bits_are_closer_to_dense_than_four(model: str) -> None:
    here = subject(model)
    eight, four = here.kl(here.prepare("quantised-8")), here.kl(here.prepare("quantised-4"))
    assert eight < four
    assert eight < 0.05


def test_numbers_beyond_float16_cannot_be_coded() -> None:
    with pytest.raises(ConfigError, match=r"magnitude 1e\+06"):
        Codes.of(torch.tensor([[[-1e6, 0.0]]]), 8)


# Bytes, by hand: 3 layers, 2 KV heads, keys and values of 16 float32 numbers = 128 bytes per token and KV head

ROW, HEADS, EXACT = 128, 6, 4 + 6  # head span and window, see `short`


@lru_cache(maxsize=1)
def short() -> Subject:
    """90 tokens: 4 at the head, 80 to decide about (5 pages of 16, or 1 cluster of 80), 6 in the window."""
    model = loaded("llama").model
    return Subject(model, prefill_cache(model, range(10, 100)), Span(head=4, tail=84, end=90), tuple(range(20, 60)))


@pytest.mark.parametrize(
    ("policy", "read", "resident", "disk"),
    [
        ("pages-minmax", (EXACT + 32) * ROW + 5 * 2 * 64, 90 * ROW + 5 * 2 * 64, 90 * ROW),
        ("clusters-drop", (EXACT + 80) * ROW + 64, 90 * ROW + 64, 90 * ROW),
        ("window-sinks", (EXACT + 20) * ROW, (EXACT + 20) * ROW, (EXACT + 20) * ROW),
        ("eviction", (EXACT + 20) * ROW, (EXACT + 20) * ROW, (EXACT + 20) * ROW),
        ("oracle", (EXACT + 20) * ROW, 90 * ROW, 90 * ROW),
        ("quantised-8", EXACT * ROW + 80 * 2 * (16 + 4), EXACT * ROW + 80 * 40, EXACT * ROW + 80 * 40),
        ("quantised-4", EXACT * ROW + 80 * 2 * (8 + 4), EXACT * ROW + 80 * 24, EXACT * ROW + 80 * 24),
    ],
)
def test_bytes_by_hand(policy: str, read: int, resident: int, disk: int) -> None:
    here = short()
    prepared = here.prepare(policy, budget=20)
    cache = PeerCache(here.dense, prepared)
    assert cache.bytes_read_per_step is None
    here.logits(cache)
    assert cache.bytes_read_per_step == read * HEADS
    assert prepared.resident_bytes == resident * HEADS
    assert prepared.disk_bytes == disk * HEADS


def test_only_global_layers_are_counted() -> None:
    here = subject("gemma3")  # 2 of 4 layers are global, 2 KV heads of 16 + 16 float32 numbers
    assert here.prepare("oracle").disk_bytes == 2 * 2 * here.span.end * 128


# What is refused


def test_a_batch_is_refused() -> None:
    here = short()
    wide = copy.deepcopy(here.dense)
    wide.batch_repeat_interleave(2)
    with pytest.raises(ConfigError, match="of one sequence, and this one holds 2"):
        prepare(PeerPolicy(name="oracle"), wide, here.span, model=here.model)
    cache = PeerCache(here.dense, here.prepare("oracle"))
    with pytest.raises(ConfigError, match="one question at a time, not a batch of 2"):
        here.model(torch.tensor([[5], [6]]), position_ids=torch.tensor([[90]]), cache=cache)


def test_a_model_that_is_not_attached_is_refused() -> None:
    here = short()
    with pytest.raises(ConfigError, match="attention is not ragkv's"):
        prepare(PeerPolicy(name="oracle"), here.dense, here.span, model=tiny_model("llama"))


def test_eviction_without_probes_is_refused() -> None:
    here = short()
    for probes in ((), range(5000)):
        with pytest.raises(ConfigError, match="eviction needs probes"):
            prepare(PeerPolicy(name="eviction"), here.dense, here.span, model=here.model, probes=probes)


def test_a_span_that_is_not_the_cache_s_is_refused() -> None:
    here = short()
    for span, match in ((Span(4, 84, 91), "span ends at 91"), (Span(4, 4, 90), "no document tokens")):
        with pytest.raises(ConfigError, match=match):
            prepare(PeerPolicy(name="oracle"), here.dense, span, model=here.model)
    with pytest.raises(ConfigError, match="prepared for 90"):
        PeerCache(subject("llama").dense, here.prepare("oracle"))


def test_bad_parameters_are_refused() -> None:
    with pytest.raises(ConfigError, match="name is 'best'; give one of clusters-drop"):
        PeerPolicy(name="best")
    with pytest.raises(ConfigError, match="budget is 0"):
        PeerPolicy(name="oracle", budget=0)
    with pytest.raises(ConfigError, match="pool is 'mean'"):
        PeerPolicy(name="pages-minmax", pool="mean")
