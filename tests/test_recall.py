"""Recall attention against a slow reference in float64 that shares no arithmetic with it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import ragkv.recall.attention
import ragkv.recall.cache
from ragkv import Archive, ArchiveCache, LoadedModel, PromptLayout, Recipe, attach, build_archive
from ragkv.model.attention import AttentionCall
from ragkv.recall.attention import BlockRecall, choose_clusters, gather_rows, recall_attention
from ragkv.recall.layers import ClusterTable
from ragkv.recall.placed import PlacedLayer
from ragkv.recipe import Limit, RecallPolicy
from tests.archives import CODED, DOCUMENT, EVERYTHING, QUESTIONS, SMALL, archive_of
from tests.decoding import Vector, decoded, of_layer, raw_bytes, scale_of
from tests.tiny import tiny_model, tiny_tokenizer


@dataclass(frozen=True)
class Recorded:
    """One call of recall attention that a model made, what it recalled (n_kv_heads, n_rows, n), and what came back."""

    call: AttentionCall
    layer: PlacedLayer
    limit: Limit
    hits: torch.Tensor
    output: torch.Tensor


def record(archive: Archive, policy: RecallPolicy | int, monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    """Every call of one prefill of a left-padded batch and of one further token."""
    recorded: list[Recorded] = []

    def spy(call: AttentionCall, layer: PlacedLayer, limit: Limit, observer: None = None) -> torch.Tensor:
        hits = Hits()
        output = recall_attention(call, layer, limit, hits)
        (found,) = hits.blocks
        recorded.append(Recorded(call, layer, limit, found, output))
        return output

    policy = RecallPolicy(budget=policy) if isinstance(policy, int) else policy
    with monkeypatch.context() as patch:
        patch.setattr(ragkv.recall.cache, "recall_attention", spy)
        archive.model.model.generate(
            **archive.questions(QUESTIONS),
            cache=ArchiveCache(archive, policy=policy),
            max_new_tokens=2,
            min_new_tokens=2,
            do_sample=False,
        )
    return recorded


class Hits:
    """Keeps which clusters each block of rows recalled."""

    def __init__(self) -> None:
        self.blocks: list[torch.Tensor] = []

    def on_recall(self, layer: PlacedLayer, recall: BlockRecall, *, begins: bool) -> None:
        assert begins == (not self.blocks)
        assert recall.choice is not None
        self.blocks.append(recall.choice.hit_ids())


class Reference:
    """One layer read back from its files: clusters as lists of tokens, everything in float64.

    Clusters may be worth exactly the same, such as those of equal size and spread to a query of zeros: any of these
    may come first, and the reference takes those that recall took.
    """

    def __init__(self, archive: Archive, index: int) -> None:
        stored = decoded(archive, index)
        self.exact, self.clusters = stored.exact, stored.clusters
        self.axes = stored.axes
        self.variances = [reach**2 for reach in stored.reach]
        self.estimate(stored.centroids, stored.means, stored.variance, stored.spread)

    def estimate(
        self, centroids: list[Vector], means: list[Vector], variance: list[Vector], spread: list[Vector]
    ) -> None:
        self.centroids, self.means = centroids, means
        self.log_sizes, self.priority = [], []
        for head, clusters in enumerate(self.clusters):
            correction = np.minimum(variance[head] / 2, 0.5)
            self.log_sizes.append(np.log([len(keys) for keys, _ in clusters]) + correction)
            self.priority.append(spread[head] * np.exp(-correction))

    def attend(self, done: Recorded, limit: Limit) -> Vector:
        """(batch, n_query_heads, every third row and the last, value_dim)."""
        call = done.call
        batch, n_query_heads, n_rows, _ = call.query.shape
        group, rows = n_query_heads // 2, some_rows(n_rows)
        out = np.zeros((batch, n_query_heads, len(rows), call.value.shape[-1]))
        for sequence in range(batch):
            for place, row in enumerate(rows):
                for head in range(2):
                    own = slice(head * group, (head + 1) * group)
                    hits = set(done.hits[head, sequence * n_rows + row].tolist())
                    out[sequence, own, place] = self._attend_row(call, limit, sequence, row, head, hits)
        return out

    def _attend_row(
        self, call: AttentionCall, limit: Limit, sequence: int, row: int, head: int, hits: set[int]
    ) -> Vector:
        group = call.query.shape[1] // 2
        queries = call.query[sequence, head * group : (head + 1) * group, row].double().numpy()
        visible = slice(None) if call.mask is None else call.mask[sequence % call.mask.shape[0], 0, row].numpy()
        local_keys = call.key[sequence, head].double().numpy()[visible]
        local_values = call.value[sequence, head].double().numpy()[visible]
        exact_keys, exact_values = self.exact[head]
        clusters = self.clusters[head]

        def logits(keys: Vector, query: Vector) -> Vector:
            raw = keys @ query * call.scaling
            return raw if call.softcap is None else call.softcap * np.tanh(raw / call.softcap)

        def sink(g: int) -> list[Vector]:
            return [] if call.sinks is None else [call.sinks[head * group + g].detach().double().numpy().reshape(1)]

        centroids, means, log_sizes = self.centroids[head], self.means[head], self.log_sizes[head]
        mass, worth = np.zeros(len(clusters)), np.zeros(len(clusters))
        for g, query in enumerate(queries):
            estimated = logits(centroids, query) + log_sizes
            rest = [logits(exact_keys, query), logits(local_keys, query), *sink(g)]
            share = softmax(np.concatenate([estimated, *rest]))[: len(clusters)]
            along = self.axes[head] @ query * call.scaling
            mass += share
            worth += share * np.exp(np.minimum(60, np.sqrt(self.variances[head] @ along**2)))
        recalled: list[int] = []
        value = np.log(worth * self.priority[head]).round(12)
        left = sorted(range(len(clusters)), key=lambda c: (value[c], c in hits))
        while left and self._goes_on(limit, head, recalled, mass[left].sum() / group):
            recalled.append(left.pop())
        keys = np.concatenate([clusters[c][0] for c in recalled] + [exact_keys, local_keys])
        values = np.concatenate([means[left]] + [clusters[c][1] for c in recalled] + [exact_values, local_values])
        attended = []
        for g, query in enumerate(queries):
            pseudo = logits(centroids[left], query) + log_sizes[left]
            weights = softmax(np.concatenate([pseudo, logits(keys, query), *sink(g)]))
            attended.append(weights[: len(values)] @ values)
        return np.stack(attended)

    def _goes_on(self, limit: Limit, head: int, recalled: list[int], estimated: float) -> bool:
        n_tokens = sum(len(self.clusters[head][c][0]) for c in recalled)
        if n_tokens >= limit.tokens or (limit.clusters is not None and len(recalled) >= limit.clusters):
            return False
        return limit.mass is None or n_tokens < limit.floor or estimated > 1 - limit.mass


def some_rows(n_rows: int) -> list[int]:
    return sorted({*range(0, n_rows, 3), n_rows - 1})


def softmax(logits: Vector) -> Vector:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def uneven_archive(folder: Path, dtype: torch.dtype = torch.float32, *, base: Recipe = SMALL) -> Archive:
    """KV head 1 of layers 0 and 1 has only zero keys: one cluster of a whole segment, head 0 has small ones."""
    model = tiny_model("llama")
    for index in (0, 1):
        model.model.layers[index].self_attn.k_proj.weight.data[16:] = 0
    subject = LoadedModel(model=attach(model.to(dtype)), tokenizer=tiny_tokenizer(), name="uneven")
    recipe = dataclasses.replace(base, segment_tokens=100)
    build_archive(subject, DOCUMENT[:1000], folder, recipe=recipe, layout=PromptLayout.plain())
    return Archive.open(folder, subject)


RECIPES = {"lossless": SMALL, "coded": CODED}
SUBJECTS = [(name, recipe) for recipe in RECIPES for name in ("llama", "gemma2", "gpt_oss", "qwen2")]


@pytest.fixture(scope="module", params=SUBJECTS, ids="-".join)
def archive(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Archive:
    folder = tmp_path_factory.mktemp("archives") / "archive"
    name, recipe = request.param
    return archive_of(folder, model=name, document=DOCUMENT[:1100], recipe=RECIPES[recipe])


@pytest.fixture(scope="module", params=RECIPES)
def uneven(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Archive:
    return uneven_archive(tmp_path_factory.mktemp("uneven") / "archive", base=RECIPES[request.param])


def assert_equals_reference(archive: Archive, recorded: list[Recorded]) -> None:
    assert {done.layer.index for done in recorded} == {e.index for e in archive.manifest.layers if e.clusters}
    for done in recorded:
        expected = torch.from_numpy(Reference(archive, done.layer.index).attend(done, done.limit))
        found = done.output[:, :, some_rows(done.output.shape[2])]
        torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=1e-5)


# The reference


@pytest.mark.parametrize("budget", [1, 30, 250])
def test_a_partial_budget_equals_the_reference(archive: Archive, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_equals_reference(archive, record(archive, budget, monkeypatch))


@pytest.mark.parametrize(
    "policy", [RecallPolicy(top_m=5), RecallPolicy(mass=0.6, floor=9, cap=90)], ids=["clusters", "mass"]
)
def test_other_limits_equal_the_reference(
    archive: Archive, policy: RecallPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_equals_reference(archive, record(archive, policy, monkeypatch))


@pytest.mark.parametrize("budget", [1, 60])
def test_heads_with_different_cluster_counts_equal_the_reference(
    uneven: Archive, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {len(set(entry.clusters)) for entry in uneven.manifest.layers[:2]} == {2}
    assert_equals_reference(uneven, record(uneven, budget, monkeypatch))


def test_everything_recalled_is_softmax_attention_over_all_tokens(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    for done in record(archive, EVERYTHING, monkeypatch):
        reference = Reference(archive, done.layer.index)
        for head, clusters in enumerate(reference.clusters):
            tokens = [(keys[i : i + 1], values[i : i + 1]) for keys, values in clusters for i in range(len(keys))]
            reference.clusters[head] = tokens  # one token each: nothing is estimated, whatever the budget
        keys_of = [np.concatenate([keys for keys, _ in clusters]) for clusters in reference.clusters]
        values_of = [np.concatenate([values for _, values in clusters]) for clusters in reference.clusters]
        none = [np.zeros(len(keys)) for keys in keys_of]
        reference.variances = [
            np.zeros((len(keys), len(axes))) for keys, axes in zip(keys_of, reference.axes, strict=True)
        ]
        reference.estimate(keys_of, values_of, none, [np.ones(len(keys)) for keys in keys_of])
        expected = torch.from_numpy(reference.attend(done, Limit(tokens=1)))
        found = done.output[:, :, some_rows(done.output.shape[2])]
        torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=1e-5)


# Blocks of rows


@pytest.mark.parametrize("block_floats", [1, 100_000])
def test_a_question_in_several_blocks_equals_one_block(
    archive: Archive, block_floats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = record(archive, 40, monkeypatch)
    monkeypatch.setattr(ragkv.recall.attention, "_BLOCK_FLOATS", block_floats)
    for done in recorded:
        hits = Hits()
        again = recall_attention(done.call, done.layer, done.limit, hits)
        assert done.output.shape[2] == 1 or len(hits.blocks) > 1
        # Padding sees nothing, and clusters may be worth exactly the same to it.
        real = torch.ones(1) if done.call.mask is None else done.call.mask.any(-1).unsqueeze(-1)
        torch.testing.assert_close(again * real, done.output * real, atol=2e-5, rtol=0)


# Numbers that must stay numbers


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_different_width_never_give_nan(
    dtype: torch.dtype, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = uneven_archive(tmp_path / "archive", dtype, base=RECIPES[recipe])
    for budget in (1, 3, 50):
        for done in record(archive, budget, monkeypatch):
            assert torch.isfinite(done.output).all()


# Choosing clusters


def test_whole_clusters_are_taken_in_descending_order_until_the_budget_is_reached() -> None:
    mass = torch.tensor([[[0.1, 0.4, 0.2, 0.3]], [[0.4, 0.3, 0.2, 0.1]]])
    sizes = torch.tensor([[5, 2, 4, 3], [6, 1, 1, 1]])
    choice = choose_clusters(mass, sizes, Limit(tokens=6))
    # Head 0: 1 (2 tokens), 3 (2 + 3 = 5), 2 (9 >= 6). Head 1: cluster 0 alone has the 6 tokens.
    assert choice.hit_ids().tolist() == [[[1, 3, 2, -1]], [[0, -1, -1, -1]]]
    assert choice.tokens.tolist() == [[9], [6]]


def test_budget_one_recalls_exactly_the_heaviest_cluster() -> None:
    mass = torch.tensor([[[0.2, 0.5, 0.3], [0.7, 0.1, 0.2]]])
    choice = choose_clusters(mass, torch.tensor([[4, 2, 1]]), Limit(tokens=1))
    assert choice.hit_ids().tolist() == [[[1], [0]]]
    assert choice.tokens.tolist() == [[2, 4]]


def test_a_budget_above_all_tokens_recalls_every_cluster_once() -> None:
    choice = choose_clusters(torch.rand(2, 3, 5), torch.full((2, 5), 3), Limit(tokens=EVERYTHING))
    assert choice.hit_ids().sort(-1).values.tolist() == [[[0, 1, 2, 3, 4]] * 3] * 2
    assert choice.tokens.tolist() == [[15] * 3] * 2


@pytest.mark.parametrize("budget", [1, 2, 4])
def test_clusters_that_a_head_does_not_have_are_no_candidates(budget: int) -> None:
    """Where float32 leaves no mass to any prototype, a head must still recall real tokens."""
    sizes = torch.tensor([[0, 0, 0, 2, 2], [1, 1, 1, 1, 1]])
    choice = choose_clusters(torch.zeros(2, 1, 5), sizes, Limit(tokens=budget))
    assert bool((choice.tokens >= budget).all())


# Fetching rows


def table_of(archive: Archive, index: int) -> ClusterTable:
    table = archive.layers[index].clusters
    assert table is not None
    return table


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gathered_rows_are_the_stored_rows_of_the_chosen_clusters_bit_for_bit(
    dtype: torch.dtype, recipe: str, tmp_path: Path
) -> None:
    archive = uneven_archive(tmp_path / "archive", dtype, base=RECIPES[recipe])
    table = table_of(archive, 1)
    stored = {
        (row["kv_head"], row["cluster"]): torch.frombuffer(bytearray(row["key_value"]), dtype=torch.uint8)
        for row in pq.read_table(archive.path / "rows.parquet").to_pylist()
        if row["layer"] == 1
    }
    mass = torch.rand(2, 4, table.n_clusters, generator=torch.Generator().manual_seed(0))
    choice = choose_clusters(mass.masked_fill(table.sizes.unsqueeze(1) == 0, 0), table.sizes, Limit(tokens=25))
    found = gather_rows(table, choice)
    assert found.rows.dtype == torch.uint8
    for head in range(2):
        for row in range(4):
            kept = [c for c in choice.hit_ids()[head, row].tolist() if c >= 0]
            expected = torch.cat([stored[head, c] for c in kept]).view(-1, table.row_bytes)
            assert int(found.real[head, row].sum()) == len(expected) >= 25
            assert torch.equal(found.rows[head, row, : len(expected)], expected)
            sizes = table.sizes[head, kept].long()
            owners = torch.tensor(kept).repeat_interleave(sizes)
            assert torch.equal(found.cluster[head, row, : len(expected)], owners)


def test_the_bias_is_the_logarithm_of_the_size_and_a_limited_correction(uneven: Archive) -> None:
    table, stored = table_of(uneven, 0), of_layer(pq.read_table(uneven.path / "prototypes.parquet"), 0)
    heads, sizes = (stored[name].to_numpy() for name in ("kv_head", "size"))
    variance = scale_of(raw_bytes(stored["spreads"])[:, 0]) ** 2
    bias = table.bias(table.spread_scales())
    assert variance.max() > 1, "the limit must matter here"
    for head in range(2):
        expected = np.log(sizes[heads == head]) + np.minimum(variance[heads == head] / 2, 0.5)
        found = bias[head]
        assert found[: len(expected)].tolist() == pytest.approx(expected.tolist(), abs=1e-5)
        assert bool((found[len(expected) :] == -torch.inf).all())
