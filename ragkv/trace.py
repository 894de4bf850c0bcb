"""What recall did, step by step: clusters, ids of the clusters hit, tokens recalled, bytes of keys and values."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch

from ragkv.layers import ArchivedLayer
from ragkv.recall import Choice

log = logging.getLogger("ragkv.recall")


@dataclass(frozen=True)
class LayerRecall:
    """Recall of one layer in one step.

    ``clusters`` in the layer per KV head; ``clusters_hit`` (n_kv_heads, n_rows, n_chosen) int64, -1 where a place is
    unused; ``tokens`` (n_kv_heads, n_rows) int64; ``unrecalled_mass`` (n_kv_heads, n_rows): share of the attention
    that went to prototypes; ``bytes`` of keys and values fetched.
    """

    layer: int
    clusters: int
    clusters_hit: torch.Tensor
    tokens: torch.Tensor
    unrecalled_mass: torch.Tensor
    bytes: int


@dataclass
class RecallTrace:
    """Collects a `LayerRecall` per layer and step; pass it as ``ArchiveCache(..., observer=RecallTrace())``.

    ``steps[i]`` lists the layers of step i: first the question (one entry per block of rows), then one token each.
    With ``keep_steps=False`` only the running figures are kept, which is what a long answer wants. ``bytes`` counts
    all keys and values fetched, ``largest_fetch`` those of the largest single recall.
    """

    keep_steps: bool = True
    steps: list[list[LayerRecall]] = field(default_factory=list)
    n_steps: int = 0
    bytes: int = 0
    largest_fetch: int = 0
    _tokens: float = 0.0
    _mass: float = 0.0
    _entries: int = 0
    _last_layer: int = 1 << 30

    def on_recall(self, layer: ArchivedLayer, choice: Choice, unrecalled_mass: torch.Tensor, *, begins: bool) -> None:
        """Record one block of rows of one layer (called by the attention function)."""
        table = layer.recall
        if table is None:
            return
        tokens = choice.tokens
        fetched = int(tokens.sum()) * table.row_bytes
        if layer.index < self._last_layer or (begins and layer.index == self._last_layer):
            self.n_steps += 1
            if self.keep_steps:
                self.steps.append([])
        self._last_layer = layer.index
        self.bytes += fetched
        self.largest_fetch = max(self.largest_fetch, fetched)
        self._tokens += float(tokens.sum())
        self._mass += float(unrecalled_mass.sum())
        self._entries += tokens.numel()
        if self.keep_steps:
            entry = LayerRecall(layer.index, table.n_clusters, choice.hit_ids(), tokens, unrecalled_mass, fetched)
            self.steps[-1].append(entry)
        if log.isEnabledFor(logging.DEBUG):
            log.debug(
                "step %d layer %d: clusters %d, hit %s, tokens recalled %s, KV bytes %d",
                self.n_steps,
                layer.index,
                table.n_clusters,
                choice.hit_ids().tolist(),
                tokens.tolist(),
                fetched,
            )

    @property
    def recalled_tokens(self) -> float:
        """Mean tokens recalled per KV head, row and layer."""
        return self._tokens / self._entries if self._entries else 0.0

    @property
    def unrecalled_mass(self) -> float:
        """Mean share of the attention that went to prototypes instead of recalled or exact tokens."""
        return self._mass / self._entries if self._entries else 0.0
