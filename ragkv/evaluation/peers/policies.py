"""What other systems do with a prefilled cache: comparison policies of the evaluation, never product features.

Each policy works on the dense cache of prefix and document, in global layers only, and decides about the document
tokens in [head, tail). The head span, the window [tail, end), and all question and answer tokens are attended exactly,
sliding layers stay as they are, and positions stay what they were. Nothing is estimated: a token that a policy does not
choose is dropped. So ragkv and its peers answer the same questions from the same cache with the same budget.

Bytes are those that a real implementation of the policy would need in the cache's dtype, over all global layers and
KV heads, whatever this module holds while it imitates one:

- read per step: keys and values of the exact spans and of the document tokens attended, and the index that is scored
  (centroids, page bounds). Question and answer tokens are left out: they are the same for every policy.
- resident: what must stay in fast memory. Systems that choose anew at each step (clusters, pages, the oracle) keep all
  keys and values and their index; those that drop or quantise once keep what is left.
- on disk: what a restart without a prefill would have to read. Centroids and page bounds are rebuilt from the keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import DynamicCache, PreTrainedModel

from ragkv.build.layer import Span
from ragkv.errors import ConfigError
from ragkv.evaluation.peers.quantise import Codes, attend_quantised
from ragkv.evaluation.peers.selection import (
    POOLS,
    ClusterSelection,
    FixedSelection,
    MassMeter,
    OracleSelection,
    PageSelection,
    Selection,
    attend_selected,
)
from ragkv.model.attention import AttentionCall, TiedCache, is_attached
from ragkv.model.prefill import layer_tensors
from ragkv.model.shape import model_shape
from ragkv.recipe import QUESTION_SHARE, RecallPolicy

PEERS: dict[str, str] = {
    "clusters-drop": "k-means by cosine, whole clusters by query . centroid, rest dropped (ClusterKV-like)",
    "pages-minmax": "pages of consecutive tokens by min/max bound, rest dropped (Quest-like)",
    "window-sinks": "first and last tokens only, not re-positioned (StreamingLLM-like)",
    "quantised-8": "all tokens, int8 with one scale and offset per token and head",
    "quantised-4": "all tokens, int4 with one scale and offset per token and head",
    "eviction": "a fixed set by the attention of probes of the document, no question seen (SnapKV/H2O-like)",
    "oracle": "the tokens of largest true attention per KV head and row, rest dropped: a bound, not a system",
}
"""Names of the policies and what they do."""

_BITS = {"quantised-8": 8, "quantised-4": 4}


@dataclass(frozen=True, kw_only=True)
class PeerPolicy:
    """One policy and its parameters.

    ``budget`` is the number of document tokens per KV head and answer token; question tokens get as many times more as
    ragkv gives them, except from the policies that fix their tokens once. Clusters and pages are taken whole, so
    slightly more may come. Quantised policies attend to everything and ignore it.
    ``tokens_per_cluster`` and ``kmeans_iterations`` belong to clusters-drop, ``page_tokens`` to pages-minmax, ``pool``
    (the max or the sum over the query heads of a group) to both.
    """

    name: str
    budget: int = RecallPolicy().budget
    tokens_per_cluster: int = 80
    kmeans_iterations: int = 10
    page_tokens: int = 16
    pool: str = "max"

    def __post_init__(self) -> None:
        for name, allowed in (("name", tuple(PEERS)), ("pool", POOLS)):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"peer policy: {name} is {getattr(self, name)!r}; give one of {', '.join(allowed)}")
        for name in ("budget", "tokens_per_cluster", "kmeans_iterations", "page_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"peer policy: {name} is {value!r}; give a whole number of at least 1")


class PeerLayer(Protocol):
    """What a policy made of one global layer; it never changes, so questions share it."""

    @property
    def resident_bytes(self) -> int: ...

    @property
    def disk_bytes(self) -> int: ...

    def attend(self, call: AttentionCall, budget: int) -> tuple[torch.Tensor, int]:
        """Attention of one call (batch of one), and the bytes that all its rows read."""
        ...


@dataclass(frozen=True)
class SelectedLayer:
    """A layer that attends to chosen document tokens. Byte counts per token of one KV head, and of the exact spans."""

    selection: Selection
    span: Span
    token_bytes: int
    exact_bytes: int
    index_bytes: int

    @property
    def resident_bytes(self) -> int:
        return self.disk_bytes + self.index_bytes

    @property
    def disk_bytes(self) -> int:
        return self.exact_bytes + self.selection.resident_tokens * self.token_bytes

    def attend(self, call: AttentionCall, budget: int) -> tuple[torch.Tensor, int]:
        out, attended = attend_selected(call, self.selection, budget, span=self.span)
        every_row = attended.shape[1] * (self.exact_bytes + self.index_bytes)
        return out, every_row + int(attended.sum()) * self.token_bytes


@dataclass(frozen=True)
class QuantisedLayer:
    """A layer that attends to all document tokens from their codes."""

    keys: Codes
    values: Codes
    span: Span
    exact_bytes: int

    @property
    def resident_bytes(self) -> int:
        return self.exact_bytes + self.keys.nbytes + self.values.nbytes

    @property
    def disk_bytes(self) -> int:
        return self.resident_bytes

    def attend(self, call: AttentionCall, budget: int) -> tuple[torch.Tensor, int]:
        out = attend_quantised(call, self.keys, self.values, span=self.span)
        return out, call.query.shape[2] * self.resident_bytes


@dataclass(frozen=True)
class PreparedPeer:
    """A policy applied to one document: ``layers`` by index of the global layer. Shared by all questions."""

    policy: PeerPolicy
    span: Span
    layers: Mapping[int, PeerLayer]

    @property
    def resident_bytes(self) -> int:
        """Bytes that must stay in fast memory, over global layers."""
        return sum(layer.resident_bytes for layer in self.layers.values())

    @property
    def disk_bytes(self) -> int:
        """Bytes that a restart without a prefill would read, over global layers."""
        return sum(layer.disk_bytes for layer in self.layers.values())


@torch.no_grad()
def prepare(
    policy: PeerPolicy, dense: DynamicCache, span: Span, *, model: PreTrainedModel, probes: Sequence[int] = ()
) -> PreparedPeer:
    """Apply `policy` to a document once; no question is seen and `dense` is not changed.

    Parameters
    ----------
    dense
        The model's own cache of prefix and document, from `ragkv.model.prefill.prefill_cache`.
    span
        From `ragkv.build.layer.document_span`.
    model
        The model that filled `dense`, with ragkv attached.
    probes
        Token ids from `ragkv.build.probes.probe_ids`; only eviction reads them. A cache holds no queries, so the
        queries that SnapKV would take from the end of the prompt are those of snippets of the
        document asked as questions.

    Raises
    ------
    ConfigError
        If the model is not attached, the cache holds several sequences or another number of tokens than the span ends
        at, no document tokens are left to decide about, or eviction has no probes within the model's context.
    """
    _check(dense, span, model)
    tensors = list(layer_tensors(dense))
    kept = _evicted(policy, dense, span, model=model, probes=probes) if policy.name == "eviction" else {}
    layers: dict[int, PeerLayer] = {}
    for shape in model_shape(model.config).global_layers:
        keys, values = (each[0] for each in tensors[shape.index])  # (n_kv_heads, n_tokens, dim)
        document = slice(span.head, span.tail)
        token_bytes = (keys.shape[-1] + values.shape[-1]) * keys.element_size()
        exact_bytes = shape.n_kv_heads * (span.end - span.tail + span.head) * token_bytes
        if policy.name in _BITS:
            codes = [Codes.of(each[:, document], _BITS[policy.name]) for each in (keys, values)]
            layers[shape.index] = QuantisedLayer(codes[0], codes[1], span, exact_bytes)
            continue
        selection = kept[shape.index] if kept else _selection(policy, keys[:, document])
        index_bytes = selection.index_values * keys.element_size()
        layers[shape.index] = SelectedLayer(selection, span, token_bytes, exact_bytes, index_bytes)
    return PreparedPeer(policy=policy, span=span, layers=layers)


class _SingleCache(TiedCache):
    """A tied cache of one sequence; a batch is refused."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if key_states.shape[0] != 1:
            raise ConfigError(f"a comparison policy answers one question at a time, not a batch of {len(key_states)}")
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


class PeerCache(_SingleCache):
    """The cache of one question under a comparison policy: pass it to the model with the question's position_ids.

    `dense` must be the cache that `prepared` was made from. It is neither changed nor copied; a cache serves one
    question, and any number of them may share both.
    """

    def __init__(self, dense: DynamicCache, prepared: PreparedPeer) -> None:
        if dense.get_seq_length() != prepared.span.end:
            raise ConfigError(
                f"the dense cache holds {dense.get_seq_length()} tokens, the policy was prepared for "
                f"{prepared.span.end}; give the cache it was prepared from"
            )
        self._meters = {index: _Tie(layer, prepared) for index, layer in prepared.layers.items()}
        super().__init__(dense, self._meters)

    @property
    def bytes_read_per_step(self) -> float | None:
        """Mean bytes that an answer token read, over global layers; None before the first one."""
        steps = max((meter.n_steps for meter in self._meters.values()), default=0)
        return sum(meter.bytes for meter in self._meters.values()) / steps if steps else None


class _Tie:
    """Hands the calls of one layer to its policy and counts what answer tokens read."""

    def __init__(self, layer: PeerLayer, prepared: PreparedPeer) -> None:
        self._layer, self._end, self._budget = layer, prepared.span.end, prepared.policy.budget
        self.n_steps = self.bytes = 0

    def attend(self, call: AttentionCall) -> torch.Tensor:
        n_rows = call.query.shape[2]
        reads_question = n_rows > 1 or n_rows == call.key.shape[2] - self._end
        out, n_bytes = self._layer.attend(call, int(self._budget * QUESTION_SHARE) if reads_question else self._budget)
        if not reads_question:
            self.n_steps += 1
            self.bytes += n_bytes
        return out


class _Watch:
    """Attends densely while a meter adds up the attention mass."""

    def __init__(self, meter: MassMeter, span: Span) -> None:
        self.meter, self._span = meter, span

    def attend(self, call: AttentionCall) -> torch.Tensor:
        return attend_selected(call, self.meter, 1, span=self._span)[0]


def _selection(policy: PeerPolicy, keys: torch.Tensor) -> Selection:
    n_kv_heads, n_document, _ = keys.shape
    if policy.name == "clusters-drop":
        per_cluster, iterations = policy.tokens_per_cluster, policy.kmeans_iterations
        return ClusterSelection.of(keys, tokens_per_cluster=per_cluster, iterations=iterations, pool=policy.pool)
    if policy.name == "pages-minmax":
        return PageSelection.of(keys, page_tokens=policy.page_tokens, pool=policy.pool)
    if policy.name == "window-sinks":
        return FixedSelection.last(policy.budget, n_kv_heads=n_kv_heads, n_document=n_document, device=keys.device)
    return OracleSelection(resident_tokens=n_kv_heads * n_document)


def _evicted(
    policy: PeerPolicy, dense: DynamicCache, span: Span, *, model: PreTrainedModel, probes: Sequence[int]
) -> dict[int, FixedSelection]:
    """What eviction keeps: the tokens that the probes, asked after the document, attend to most, per KV head."""
    shape, end = model_shape(model.config), span.end + len(probes)
    limits = [limit for limit in (shape.max_positions, shape.static_positions) if limit is not None]
    if not probes or end > min(limits, default=end):
        raise ConfigError(
            f"eviction needs probes to watch and has {len(probes)} tokens of them after {span.end} of the document; "
            f"give probe_ids(...) of a document that is long enough, within {min(limits, default=end)} tokens in all"
        )
    watches = {
        layer.index: _Watch(
            MassMeter(n_kv_heads=layer.n_kv_heads, n_document=span.tail - span.head, device=model.device), span
        )
        for layer in shape.global_layers
    }
    model.get_decoder()(
        input_ids=torch.tensor([list(probes)], device=model.device),
        position_ids=torch.arange(span.end, end, device=model.device).unsqueeze(0),
        cache=_SingleCache(dense, watches),
        use_cache=True,
    )
    return {index: FixedSelection.heaviest(watch.meter.mass, policy.budget) for index, watch in watches.items()}


def _check(dense: DynamicCache, span: Span, model: PreTrainedModel) -> None:
    if not is_attached(model):
        raise ConfigError("the model's attention is not ragkv's; load it with load_model or call attach(model)")
    n_sequences = max((len(keys) for keys, _ in layer_tensors(dense)), default=0)
    if n_sequences != 1:
        raise ConfigError(f"a comparison policy takes a dense cache of one sequence, and this one holds {n_sequences}")
    if dense.get_seq_length() != span.end:
        raise ConfigError(f"the dense cache holds {dense.get_seq_length()} tokens and the span ends at {span.end}")
    if not 0 <= span.head < span.tail <= span.end:
        raise ConfigError(f"no document tokens to decide about: the span is [{span.head}, {span.tail}) of {span.end}")
