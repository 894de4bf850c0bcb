"""Probes: snippets of the document asked as questions, and the moments of their queries."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from ragkv.archive.codec import scale_of
from ragkv.build.cluster import Clusters, cluster_keys
from ragkv.build.layer import ClusteredLayer, encode_layer, fit_layer
from ragkv.build.probes import N_PROBES, SNIPPET_TOKENS, probe_ids, query_moments
from ragkv.model.attention import attach
from ragkv.model.prefill import prefill_cache
from ragkv.model.prompt import PromptLayout, tokenize_prompt
from ragkv.recipe import QUESTION_SHARE, RecallPolicy, Recipe
from tests.archives import DOCUMENT, loaded
from tests.tiny import tiny_model

LAYOUT = PromptLayout.plain()


def document_ids() -> tuple[int, ...]:
    return tokenize_prompt(loaded("llama").tokenizer, LAYOUT, DOCUMENT).document_ids


def test_probes_ask_snippets_of_the_document_and_answer_with_what_follows() -> None:
    tokenizer, ids = loaded("llama").tokenizer, document_ids()
    text = tokenizer.decode(probe_ids(tokenizer, LAYOUT, ids))
    assert text.count("Question:") == N_PROBES
    first = (len(ids) - 2 * SNIPPET_TOKENS) // (2 * N_PROBES)
    assert tokenizer.decode(list(ids[first + SNIPPET_TOKENS : first + 2 * SNIPPET_TOKENS])) in text


def test_a_short_document_has_no_probes() -> None:
    assert probe_ids(loaded("llama").tokenizer, LAYOUT, document_ids()[:100]) == []


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "gemma3"])
def test_moments_are_those_of_the_scaled_queries_and_the_cache_is_left_alone(name: str) -> None:
    model, ids = loaded(name).model, list(document_ids())[:120]
    cache = prefill_cache(model, ids)
    before = [layer.keys.clone() for layer in cache.layers]
    probes = ids[:30]
    moments = query_moments(model, cache, probes)
    queries: dict[int, torch.Tensor] = {}
    modules = [module for module in model.modules() if hasattr(module, "q_proj")]
    hooks = [
        module.q_proj.register_forward_hook(lambda m, _, out, i=index: queries.update({i: out.detach()}))
        for index, module in enumerate(modules)
    ]
    query_moments(model, cache, probes)
    for hook in hooks:
        hook.remove()
    assert all(torch.equal(old, layer.keys) for old, layer in zip(before, cache.layers, strict=True))
    for index, moment in moments.items():
        assert moment.shape[0] == 2
        torch.testing.assert_close(moment, moment.transpose(1, 2))
        if name not in (
            "gemma3",
            "gpt_oss",
        ):  # they normalise queries or scale them by YaRN; a rotation keeps the trace
            width = queries[index].shape[-1] // 2
            energy = queries[index].reshape(-1, 2, width).square().sum((0, 2)) * modules[index].scaling ** 2
            traces = moment.diagonal(dim1=1, dim2=2).sum(1) * len(probes) * (width // moment.shape[1])
            torch.testing.assert_close(traces, energy, rtol=1e-3, atol=0)


def test_probes_beyond_the_context_are_left_out() -> None:
    model = attach(tiny_model("llama"))
    model.config.max_position_embeddings = 130
    cache = prefill_cache(model, list(document_ids())[:120])
    assert query_moments(model, cache, list(range(20))) == {}
    assert isinstance(cache, DynamicCache)


def spreads_of(keys: torch.Tensor, values: torch.Tensor, moment: torch.Tensor | None) -> torch.Tensor:
    """Change of a logit, distance of the values and reach along the axes of two clusters: the first two tokens, the
    others; prototypes have all the bits there are."""
    labels = torch.tensor([[0, 0, *[1] * (keys.shape[1] - 2)]])
    clusters = Clusters(labels=labels, n_clusters=torch.tensor([2]), asked=2)
    part = ClusteredLayer(keys, values, 0, clusters, moment)
    recipe = Recipe(key_codec="lossless", value_codec="lossless", key_prototype_bits=8, value_prototype_bits=8)
    return scale_of(encode_layer(part, fit_layer([part], recipe, 0)).prototypes.spreads[0])


def test_spreads_by_hand() -> None:
    """To the eighth of an octave that a scale has, and what the prototypes are off."""
    keys = torch.tensor([[[1.0, 0.0], [3.0, 0.0], [0.0, 5.0]]])
    values = torch.tensor([[[0.0, 0.0], [6.0, 0.0], [0.0, 0.0]]])  # their mean is 2
    moment = torch.tensor([[[4.0, 0.0], [0.0, 9.0]]])
    change, distance = spreads_of(keys, values, moment)[:, :2].T
    assert float(change[0]) == pytest.approx(2, rel=0.06)  # one to either side of the centroid, 2 in logits
    assert float(change[1]) < 0.2
    assert distance.tolist() == pytest.approx([((4 + 16) / 2) ** 0.5, 2], rel=0.06)
    assert not spreads_of(keys, values, None)[:, 0].any()


def test_reach_along_the_axes_adds_up_to_the_change_of_a_logit() -> None:
    """With as many axes as numbers nothing of the residuals is left out: q m q over the axes is that of the keys."""
    draw = torch.Generator().manual_seed(0)
    keys, values = torch.randn(1, 40, 4, generator=draw), torch.randn(1, 40, 4, generator=draw)
    queries = torch.randn(1, 100, 4, generator=draw)
    moment = queries.transpose(1, 2) @ queries / 100
    found = spreads_of(keys, values, moment)
    clusters = Clusters(torch.tensor([[0, 0, *[1] * 38]]), torch.tensor([2]), 2)
    recipe = Recipe(key_codec="lossless", value_codec="lossless", key_prototype_bits=8, value_prototype_bits=8)
    axes = fit_layer([ClusteredLayer(keys, values, 0, clusters, moment)], recipe, 0).key_axes.float()
    squares = torch.stack([reach.square() @ (axes[0] @ queries[0].T).square() for reach in found[:, 2:]]).mean(1)
    # products of different axes have no part in a large cluster, whose residuals are what the axes were fitted to
    assert float(squares[1]) == pytest.approx(float(found[1, 0].square()), rel=0.15)


def test_the_metric_groups_by_what_queries_see() -> None:
    """Two dimensions carry a grouping each; queries see only the second, so that one decides."""
    draw = torch.Generator().manual_seed(0)
    first, second = torch.randint(0, 2, (2, 64), generator=draw)
    keys = torch.stack([first * 10.0, second * 4.0], dim=-1).unsqueeze(0)
    moment = torch.tensor([[[0.0, 0.0], [0.0, 1.0]]])
    recipe = Recipe(tokens_per_cluster=32)
    seen = cluster_keys(keys, recipe, query_moment=moment).labels[0]
    plain = cluster_keys(keys, recipe).labels[0]
    assert len({(int(a), int(b)) for a, b in zip(seen, second, strict=True)}) == 2
    assert len({(int(a), int(b)) for a, b in zip(plain, first, strict=True)}) == 2


def test_question_tokens_recall_more_than_answer_tokens() -> None:
    policy = RecallPolicy(budget=256)
    assert policy.limit(0, question=False).tokens == 256
    assert policy.limit(0, question=True).tokens == int(256 * QUESTION_SHARE) > 256
