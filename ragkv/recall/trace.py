"""What recall did, step by step: clusters, ids of the clusters hit, tokens recalled, bytes of keys and values."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch

from ragkv.recall.attention import BlockRecall, Observer
from ragkv.recall.placed import PlacedLayer

log = logging.getLogger("ragkv.recall.attention")


@dataclass(frozen=True)
class LayerRecall:
    """Recall of one layer in one step.

    ``clusters`` in the layer per KV head, of all documents; ``clusters_hit`` (n_kv_heads, n_rows, n_chosen) int64, -1
    where a place is unused; ``tokens`` (n_kv_heads, n_rows) int64; ``unrecalled_mass`` (n_kv_heads, n_rows): share of
    the attention that went to prototypes; ``bytes`` of keys and values fetched.
    """

    layer: int
    clusters: int
    clusters_hit: torch.Tensor
    tokens: torch.Tensor
    unrecalled_mass: torch.Tensor
    bytes: int


@dataclass(frozen=True)
class LayerMeans:
    """Recall in one layer, as means over KV heads and rows: tokens recalled, and the share (0 to 1) of the attention
    that was estimated from prototypes.
    """

    layer: int
    recalled_tokens: float
    unrecalled_mass: float


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
    _sums: dict[int, list[float]] = field(default_factory=dict)
    _last_layer: int = 1 << 30

    def on_recall(self, layer: PlacedLayer, recall: BlockRecall, *, begins: bool) -> None:
        """Record one block of rows of one layer (called by the attention function)."""
        choice = recall.choice
        if choice is None:
            return
        tokens, unrecalled_mass, fetched = choice.tokens, recall.unrecalled_mass, recall.fetched_bytes
        if layer.index < self._last_layer or (begins and layer.index == self._last_layer):
            self.n_steps += 1
            if self.keep_steps:
                self.steps.append([])
        self._last_layer = layer.index
        self.bytes += fetched
        self.largest_fetch = max(self.largest_fetch, fetched)
        sums = self._sums.setdefault(layer.index, [0.0, 0.0, 0.0])
        for place, more in enumerate((tokens.numel(), float(tokens.sum()), float(unrecalled_mass.sum()))):
            sums[place] += more
        if self.keep_steps:
            entry = LayerRecall(layer.index, layer.n_clusters, choice.hit_ids(), tokens, unrecalled_mass, fetched)
            self.steps[-1].append(entry)
        if log.isEnabledFor(logging.DEBUG):
            log.debug(
                "step %d layer %d: clusters %d, hit %s, tokens recalled %s, KV bytes %d",
                self.n_steps,
                layer.index,
                layer.n_clusters,
                choice.hit_ids().tolist(),
                tokens.tolist(),
                fetched,
            )

    @property
    def layers(self) -> tuple[LayerMeans, ...]:
        """Means per KV head and row of each layer that recalls."""
        return tuple(LayerMeans(layer, tokens / n, mass / n) for layer, (n, tokens, mass) in sorted(self._sums.items()))

    @property
    def recalled_tokens(self) -> float:
        """Mean tokens recalled per KV head, row and layer."""
        return self._mean(1)

    @property
    def unrecalled_mass(self) -> float:
        """Mean share of the attention that went to prototypes instead of recalled or exact tokens."""
        return self._mean(2)

    def _mean(self, place: int) -> float:
        entries = sum(sums[0] for sums in self._sums.values())
        return sum(sums[place] for sums in self._sums.values()) / entries if entries else 0.0


class Observers:
    """Several observers of one cache; those that are None are left out."""

    def __init__(self, *observers: Observer | None) -> None:
        self._observers = [observer for observer in observers if observer is not None]

    def on_recall(self, layer: PlacedLayer, recall: BlockRecall, *, begins: bool) -> None:
        """Pass one block of rows on to each."""
        for observer in self._observers:
            observer.on_recall(layer, recall, begins=begins)
