"""How good recall is in each layer against dense attention for the very same queries, and what its error is made of.

A dense answer is forced through the archive. In each layer the queries that come attend a second time: densely, to
the model's own keys and values of the document and to the same local tokens. So no layer is charged with what earlier
ones got wrong. This reference is computed in float32, and so are two variations that take the archive apart:

- codes only: dense attention over the keys and values as the archive decodes them. Nothing is estimated.
- clusters only: the clusters that the archive did recall, with the model's own keys and values; the others as their
  prototypes, as they are stored. That is what an archive of the same clusters with lossless codecs does, to the token:
  its prototypes are stored alike, and codes have no say in the choice of clusters but by the exact tokens. Working it
  out here needs no second archive, and compares the same clusters for the same queries even in deeper layers, where the
  queries of a second archive would be others.

Errors are squared, so two independent causes add up to the error of what the archive really returned. Where that is
above the sum the causes reinforce each other; below, they cancel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from transformers import DynamicCache

from ragkv.errors import ConfigError
from ragkv.evaluation.fidelity import decode_answer
from ragkv.model.attention import ArchivedAttention, AttentionCall, cap, tag
from ragkv.model.prefill import fork_cache, layer_tensors
from ragkv.model.prompt import question_ids
from ragkv.recall.archive import Archive
from ragkv.recall.attention import BlockRecall
from ragkv.recall.cache import ArchiveCache, ArchiveCacheLayer
from ragkv.recall.layers import ArchivedLayer, decode_rows
from ragkv.recall.placed import PlacedLayer
from ragkv.recipe import RecallPolicy

_BLOCK_FLOATS = 1 << 23  # attention weights held at once; longer questions are compared in blocks of rows


@dataclass(frozen=True, kw_only=True)
class RowFidelity:
    """Recall of some rows (query tokens) of one layer against dense attention.

    Parameters
    ----------
    attention_recall
        Share of the true attention to tokens (prefix, document and local ones; a model's sink logits are no tokens)
        that falls on tokens recalled or always attended exactly.
    archived_recall
        The same of archived tokens alone: true attention to those recalled over that to all of them. 1 where a layer
        archives none.
    output_error
        Sum of |o - o*|^2 over sum of |o*|^2, o being what the archive's attention returned, in the model's dtype.
    codes_error, clusters_error
        The same with only codes, or only clusters, in place of the model's own keys and values.
    recalled_tokens
        Mean archived tokens recalled per KV head and row.
    unrecalled_mass
        Mean share of the attention that recall gave to prototypes.
    n_rows
        Rows measured. All other figures are NaN when there were none, as when every answer is a single token.
    """

    attention_recall: float
    archived_recall: float
    output_error: float
    codes_error: float
    clusters_error: float
    recalled_tokens: float
    unrecalled_mass: float
    n_rows: int


@dataclass(frozen=True, kw_only=True)
class LayerFidelity(RowFidelity):
    """A global layer: the figures are those of answer tokens, ``question`` has those of question tokens."""

    layer: int
    question: RowFidelity


@torch.no_grad()
def probe_layers(
    archive: Archive,
    dense: DynamicCache,
    questions: Sequence[str],
    *,
    policy: RecallPolicy | None = None,
    max_new_tokens: int = 24,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[LayerFidelity, ...]:
    """Measure every global layer while the dense answers of `questions` are forced through the archive.

    Keys and values of all global layers, the model's own and decoded ones, are held in float32 meanwhile: four times
    a bfloat16 cache. `dense`, the model's own cache of the same prefix and document, is copied for each question and
    not changed. Question rows and answer rows recall what `policy` (by default the recipe's) gives them.

    Raises
    ------
    ConfigError
        If there are no questions, or `dense` holds several sequences or another number of tokens than the archive.
    """
    if not questions or isinstance(questions, str):
        raise ConfigError("give a list with at least one question")
    _check(archive, dense)
    model, layout = archive.model, archive.manifest.layout
    tensors = list(layer_tensors(dense))
    global_layers = [layer for layer in archive.layers if layer.window is None]
    probes = {
        layer.index: LayerProbe(_document(archive, layer, *(each[0] for each in tensors[layer.index])))
        for layer in global_layers
    }
    for done, question in enumerate(questions):
        inputs = archive.pad([question_ids(model.tokenizer, layout, question)])
        answer = decode_answer(model, inputs, fork_cache(dense), stop=layout.stop, max_new_tokens=max_new_tokens)
        decode_answer(
            model,
            inputs,
            _ProbedCache(archive, probes, policy),
            stop=layout.stop,
            max_new_tokens=max_new_tokens,
            forced=answer.token_ids,
        )
        if on_progress is not None:
            on_progress(done + 1, len(questions))
    return tuple(probe.fidelity(index) for index, probe in probes.items())


@dataclass(frozen=True)
class ProbedDocument:
    """A document in one layer, by position and as the archive holds it.

    ``keys`` and ``values`` (n_kv_heads, n_tokens, dim) of the model's own cache, ``decoded_keys`` and
    ``decoded_values`` of the archive; ``cluster`` (n_kv_heads, n_tokens) int64, n_clusters for tokens that are always
    attended exactly; ``centroids`` and ``means`` (n_kv_heads, n_clusters, dim) and ``bias`` (n_kv_heads, n_clusters)
    of the prototypes, ``n_archived`` tokens behind them per KV head. All but ``cluster`` are float32: a wider copy for
    each token of an answer would take longer than the attention.
    """

    keys: torch.Tensor
    values: torch.Tensor
    decoded_keys: torch.Tensor
    decoded_values: torch.Tensor
    cluster: torch.Tensor
    centroids: torch.Tensor
    means: torch.Tensor
    bias: torch.Tensor
    n_archived: int

    @property
    def n_clusters(self) -> int:
        return self.centroids.shape[1]


def _document(archive: Archive, layer: ArchivedLayer, keys: torch.Tensor, values: torch.Tensor) -> ProbedDocument:
    """Put a layer's decoded tokens at their positions, beside the model's own `keys` and `values`."""
    keys, values, table = keys.float(), values.float(), layer.clusters
    n_clusters = 0 if table is None else table.n_clusters
    decoded_keys, decoded_values = torch.empty_like(keys), torch.empty_like(values)
    decoded_keys[:, layer.exact_positions] = layer.keys.float()
    decoded_values[:, layer.exact_positions] = layer.values.float()
    cluster = torch.full(keys.shape[:2], n_clusters, device=keys.device)
    centroids, means, bias = (each.new_empty(len(keys), 0, each.shape[2]) for each in (keys, values, keys))
    bias = bias[..., 0]
    if table is not None:
        position = archive.positions(layer.index).to(keys.device)
        numbers = torch.arange(n_clusters, device=keys.device)
        labels = torch.stack([numbers.repeat_interleave(sizes) for sizes in table.sizes.long()])
        cluster.scatter_(1, position, labels)
        centroids, means, bias = table.centroids(), table.mean_values(), table.bias(table.spread_scales())
        for whole, archived in zip((decoded_keys, decoded_values), decode_rows(table), strict=True):
            whole.scatter_(1, position.unsqueeze(-1).expand_as(archived), archived)
    return ProbedDocument(
        keys=keys,
        values=values,
        decoded_keys=decoded_keys,
        decoded_values=decoded_values,
        cluster=cluster,
        centroids=centroids,
        means=means,
        bias=bias,
        n_archived=0 if table is None else table.n_tokens,
    )


@dataclass
class _Sums:
    """Running sums over rows, KV heads and query heads."""

    attended: float = 0.0
    tokens: float = 0.0
    recalled: float = 0.0
    archived: float = 0.0
    output: float = 0.0
    codes: float = 0.0
    clusters: float = 0.0
    norm: float = 0.0
    n_recalled: float = 0.0
    unrecalled: float = 0.0
    n_entries: int = 0
    n_rows: int = 0

    def figures(self) -> dict[str, Any]:
        """The fields of a `RowFidelity`."""
        nothing_archived = float("nan") if self.n_rows == 0 else 1.0
        return {
            "attention_recall": _ratio(self.attended, self.tokens),
            "archived_recall": self.recalled / self.archived if self.archived else nothing_archived,
            "output_error": _ratio(self.output, self.norm),
            "codes_error": _ratio(self.codes, self.norm),
            "clusters_error": _ratio(self.clusters, self.norm),
            "recalled_tokens": _ratio(self.n_recalled, self.n_entries),
            "unrecalled_mass": _ratio(self.unrecalled, self.n_entries),
            "n_rows": self.n_rows,
        }


@dataclass(frozen=True)
class CallRecall:
    """What one call recalled.

    ``hit`` (n_kv_heads, n_rows, n_clusters + 1) boolean, always true at the end, where exact tokens have their
    "cluster"; ``tokens`` and ``unrecalled_mass`` (n_kv_heads, n_rows).
    """

    hit: torch.Tensor
    tokens: torch.Tensor
    unrecalled_mass: torch.Tensor


class LayerProbe:
    """Compares the calls of one layer with dense attention and adds up."""

    def __init__(self, document: ProbedDocument) -> None:
        self.document = document
        self._answer, self._question = _Sums(), _Sums()

    def compare(self, call: AttentionCall, out: torch.Tensor, recalled: CallRecall) -> None:
        """Add the rows of one call, for which the archive's attention returned `out`."""
        n_rows, n_local = call.query.shape[2], call.key.shape[2]
        sums = self._question if n_rows > 1 or n_rows == n_local else self._answer
        per_row = call.query.shape[1] * (self.document.keys.shape[1] + self.document.n_clusters + n_local)
        block = max(1, _BLOCK_FLOATS // per_row)
        for start in range(0, n_rows, block):
            rows = slice(start, min(start + block, n_rows))
            self._compare_rows(_Rows(call, rows), out[0, :, rows], recalled.hit[:, rows], sums)
        sums.n_recalled += float(recalled.tokens.sum())
        sums.unrecalled += float(recalled.unrecalled_mass.sum())
        sums.n_entries += recalled.tokens.numel()
        sums.n_rows += n_rows

    def fidelity(self, index: int) -> LayerFidelity:
        question = RowFidelity(**self._question.figures())
        return LayerFidelity(layer=index, question=question, **self._answer.figures())

    def _compare_rows(self, block: _Rows, out: torch.Tensor, hit: torch.Tensor, sums: _Sums) -> None:
        document, n_tokens = self.document, self.document.keys.shape[1]
        cluster = document.cluster.unsqueeze(1).expand(-1, hit.shape[1], -1)
        attended = hit.gather(2, cluster).unsqueeze(1)  # (n_kv_heads, 1, n_rows, n_tokens)
        logits = block.logits(document.keys)
        weights, true = block.attend((logits, document.values))
        _, codes = block.attend((block.logits(document.decoded_keys), document.decoded_values))
        prototypes = block.logits(document.centroids) + document.bias[:, None, None]
        prototypes = prototypes.masked_fill(hit[:, None, :, : document.n_clusters], -torch.inf)
        exact = logits.masked_fill(~attended, -torch.inf)
        _, clusters = block.attend((exact, document.values), (prototypes, document.means))
        archived = (document.cluster < document.n_clusters)[:, None, None]
        to_archived = float((weights[..., :n_tokens] * archived).sum())
        to_recalled = float((weights[..., :n_tokens] * (archived & attended)).sum())
        sums.tokens += float(weights.sum())
        sums.attended += float(weights.sum()) - to_archived + to_recalled
        sums.archived += to_archived
        sums.recalled += to_recalled
        sums.output += float((out.float().reshape(true.shape) - true).square().sum())
        sums.codes += float((codes - true).square().sum())
        sums.clusters += float((clusters - true).square().sum())
        sums.norm += float(true.square().sum())


class _Rows:
    """Some query rows of a call (batch of one), query heads by KV head, and their local tokens."""

    def __init__(self, call: AttentionCall, rows: slice) -> None:
        query = call.query[0, :, rows].float() * call.scaling
        self._heads, (n_query_heads, self._n_rows, _) = call.key.shape[1], query.shape
        self._group = n_query_heads // self._heads
        self._query = query.reshape(self._heads, self._group * self._n_rows, -1)
        self._softcap, self._values = call.softcap, call.value[0].float()
        self._local = self.logits(call.key[0])
        if call.mask is not None:
            self._local = self._local.masked_fill(~call.mask[0, 0, rows], -torch.inf)
        self._sinks: torch.Tensor | None = None
        if call.sinks is not None:
            sinks = call.sinks.float().view(self._heads, self._group, 1, 1)
            self._sinks = sinks.expand(-1, -1, self._n_rows, -1)

    def logits(self, keys: torch.Tensor) -> torch.Tensor:
        """Logits of keys (n_kv_heads, n, head_dim): (n_kv_heads, group, n_rows, n)."""
        products = self._query @ keys.float().transpose(1, 2)
        return cap(products, self._softcap).view(self._heads, self._group, self._n_rows, -1)

    def attend(self, *parts: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend to parts of tokens, each given as logits and values, and to the local tokens behind them.

        Returns the weights (n_kv_heads, group, n_rows, n + n_local) in that order, without those of sinks, and the
        output (n_kv_heads, group, n_rows, value_dim).
        """
        parts = (*parts, (self._local, self._values))
        logits = [part for part, _ in parts] + ([] if self._sinks is None else [self._sinks])
        widths = [part.shape[-1] for part, _ in parts]
        weights = torch.cat(logits, dim=-1).softmax(-1)[..., : sum(widths)]
        shares = weights.flatten(1, 2).split(widths, dim=-1)
        out = torch.stack([share @ values for share, (_, values) in zip(shares, parts, strict=True)]).sum(0)
        return weights, out.view(self._heads, self._group, self._n_rows, -1)


class _Hits:
    """Observes one layer at a time; blocks of rows become one call again."""

    def __init__(self) -> None:
        self._blocks: list[CallRecall] = []

    def on_recall(self, layer: PlacedLayer, recall: BlockRecall, *, begins: bool) -> None:
        if begins:
            self._blocks.clear()
        choice = recall.choice
        if choice is None:
            return
        hit = torch.zeros(*choice.tokens.shape, layer.n_clusters + 1, dtype=torch.bool, device=choice.kept.device)
        hit.scatter_(2, choice.clusters, choice.kept)[..., layer.n_clusters] = True
        self._blocks.append(CallRecall(hit, choice.tokens, recall.unrecalled_mass))

    def take(self, document: ProbedDocument, n_rows: int) -> CallRecall:
        """What the call just made recalled: everything where a layer chose nothing."""
        blocks, self._blocks = self._blocks, []
        if not blocks:
            hit = document.cluster.new_ones(len(document.keys), n_rows, document.n_clusters + 1, dtype=torch.bool)
            tokens = torch.full(hit.shape[:2], document.n_archived, device=hit.device)
            return CallRecall(hit, tokens, torch.zeros_like(tokens))
        joined = (torch.cat([getattr(block, field.name) for block in blocks], dim=1) for field in fields(CallRecall))
        return CallRecall(*joined)


class _Tie:
    """Attends through an archive and hands the call to a probe."""

    def __init__(self, archived: ArchivedAttention, probe: LayerProbe, hits: _Hits) -> None:
        self._archived, self._probe, self._hits = archived, probe, hits

    def attend(self, call: AttentionCall) -> torch.Tensor:
        out = self._archived.attend(call)
        self._probe.compare(call, out, self._hits.take(self._probe.document, call.query.shape[2]))
        return out


class _ProbedCache(ArchiveCache):
    """The cache of one question whose keys carry probes in front of the archived layers."""

    def __init__(self, archive: Archive, probes: dict[int, LayerProbe], policy: RecallPolicy | None) -> None:
        self._probes, self._hits = probes, _Hits()
        super().__init__(archive, policy=policy, observer=self._hits)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        probe, layer = self._probes.get(layer_idx), self.layers[layer_idx]
        if probe is None or not isinstance(layer, ArchiveCacheLayer):
            return keys, values
        return tag(keys.view_as(keys), _Tie(layer, probe, self._hits)), values


def _check(archive: Archive, dense: DynamicCache) -> None:
    n_sequences = max((len(keys) for keys, _ in layer_tensors(dense)), default=0)
    if n_sequences != 1:
        raise ConfigError(f"layers are probed with a dense cache of one sequence, and this one holds {n_sequences}")
    if dense.get_seq_length() != archive.n_tokens:
        raise ConfigError(
            f"the dense cache holds {dense.get_seq_length()} tokens and the archive {archive.n_tokens}; give the cache "
            "of the archive's own prefix and document"
        )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")
