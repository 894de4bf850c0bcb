"""A layer of several documents as one request attends to it: each document where it was put, behind one prefix.

Documents are moved by turning queries, never keys: a rotary position encoding makes the product of a query at position
q with a key at p depend on q - p alone, so that a query turned back by d sees the document d positions further on.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

from ragkv.errors import ConfigError
from ragkv.recall.layers import ArchivedLayer, ClusterTable

_LEAST_WEIGHT, _MOST_WEIGHT = 0.01, 100  # beyond, logits leave what float32 and a softmax can tell apart


@dataclass(frozen=True)
class Part:
    """What a request attends to of one document in one layer.

    ``turn`` (key_dim, key_dim) float32 is what its queries are multiplied with, None where the document stands where it
    was prefilled. ``exact_bias`` (n_exact,) float32 is added to the logits of exact tokens, -inf at those that are left
    out; None where there is nothing to add. The first ``n_prefix`` positions of the document are prefix.
    """

    layer: ArchivedLayer
    turn: torch.Tensor | None = None
    exact_bias: torch.Tensor | None = None
    n_prefix: int = 0

    @property
    def n_held(self) -> int:
        return self.layer.n_held

    @property
    def n_clusters(self) -> int:
        return self.layer.n_clusters

    def in_document(self) -> torch.Tensor:
        """Which of the held keys are not prefix: (n_held,) boolean."""
        exact = self.layer.exact_positions >= self.n_prefix
        return torch.cat([exact.new_ones(self.n_held - len(exact)), exact])


@dataclass(frozen=True)
class Weighting:
    """How the documents' part of the attention is weighted against prefix and question (APE, arXiv 2502.05431).

    Logits of document tokens are divided by ``temperature``, and the mass they have together is raised to the power
    ``scale``. Both 1 leave attention as the model computes it.
    """

    temperature: float = 1.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        for name, value in (("temperature", self.temperature), ("scale", self.scale)):
            if not isinstance(value, int | float) or not _LEAST_WEIGHT <= value <= _MOST_WEIGHT:
                raise ConfigError(
                    f"weighting: {name} is {value!r}; give a number from {_LEAST_WEIGHT} to {_MOST_WEIGHT}, 1 for none"
                )


@dataclass(frozen=True)
class PlacedLayer:
    """One layer of all documents of a request; `parts` in the order of the documents."""

    parts: tuple[Part, ...]
    weighting: Weighting = Weighting()

    @property
    def index(self) -> int:
        return self.parts[0].layer.index

    @property
    def window(self) -> int | None:
        return self.parts[0].layer.window

    @property
    def n_kv_heads(self) -> int:
        return self.parts[0].layer.keys.shape[0]

    @cached_property
    def n_held(self) -> int:
        """Prototypes and exact tokens of all documents."""
        return sum(part.n_held for part in self.parts)

    @cached_property
    def n_clusters(self) -> int:
        return sum(part.n_clusters for part in self.parts)

    @cached_property
    def n_archived(self) -> int:
        """Archived tokens of a KV head, in all documents."""
        return sum(table.n_tokens for table in self._tables)

    @cached_property
    def largest(self) -> int:
        """Tokens of the largest cluster; 0 without clusters."""
        return max((table.largest for table in self._tables), default=0)

    @cached_property
    def sizes(self) -> torch.Tensor | None:
        """Sizes of all clusters, documents one after another: (n_kv_heads, n_clusters); None without clusters."""
        sizes = [table.sizes for table in self._tables]
        return torch.cat(sizes, dim=1) if len(sizes) > 1 else next(iter(sizes), None)

    @cached_property
    def first_clusters(self) -> torch.Tensor:
        """Where the clusters of each document that has some begin among all: (n,) int64."""
        counts = [table.n_clusters for table in self._tables]
        return torch.tensor([0, *accumulate(counts)][: len(counts)], device=self.parts[0].layer.keys.device)

    @cached_property
    def padded(self) -> bool:
        """Whether some of the `sizes` are 0."""
        return any(table.padded for table in self._tables)

    @cached_property
    def in_document(self) -> torch.Tensor:
        """Which of the held keys are not prefix, documents one after another: (n_held,) boolean."""
        return torch.cat([part.in_document() for part in self.parts])

    @property
    def _tables(self) -> list[ClusterTable]:
        return [part.layer.clusters for part in self.parts if part.layer.clusters is not None]


def alone(layer: ArchivedLayer) -> PlacedLayer:
    """A single document where it was prefilled."""
    return PlacedLayer((Part(layer),))
