"""Which document tokens a comparison policy attends to, and exact attention over those: the rest is dropped.

These imitate what other systems do, for the evaluation only. A selection says, for each query row and KV head, which
document tokens take part; nothing here estimates what is left out, because that is what ragkv does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from ragkv.build.cluster import assign
from ragkv.build.groups import group_sizes, group_sums
from ragkv.build.layer import Span
from ragkv.model.attention import AttentionCall, cap
from ragkv.recall.attention import choose_clusters
from ragkv.recipe import Limit

POOLS = ("max", "sum")
"""How the scores of the query heads of a group become one score of their KV head."""

_BLOCK_FLOATS = 1 << 24  # logits held at once; longer questions are attended in blocks of rows


@dataclass(frozen=True)
class RowBlock:
    """Some query rows of one layer on their way through attention, everything float32.

    ``query`` (n_kv_heads, n_rows, group, head_dim), scaled; ``logits`` (n_kv_heads, n_rows, group, n_keys (+ 1 with a
    sink)), capped and causal; ``document`` is where the document tokens subject to a policy stand among the keys.
    """

    query: torch.Tensor
    logits: torch.Tensor
    document: slice

    def mass(self) -> torch.Tensor:
        """Exact attention on each document token, summed over the group: (n_kv_heads, n_rows, n_document)."""
        return self.logits.softmax(-1)[..., self.document].sum(2)


class Selection(Protocol):
    """A rule that picks document tokens for query rows.

    ``index_values`` is how many numbers a step reads to choose, over all KV heads; ``resident_tokens`` how many
    document tokens must stay in fast memory, counted over KV heads.
    """

    @property
    def index_values(self) -> int: ...

    @property
    def resident_tokens(self) -> int: ...

    def keep(self, block: RowBlock, budget: int) -> torch.Tensor:
        """Boolean (n_kv_heads, n_rows, n_document): true where a row attends."""
        ...


def attend_selected(
    call: AttentionCall, selection: Selection, budget: int, *, span: Span
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the selected document tokens and to every key outside [head, tail).

    Returns (1, n_query_heads, n_rows, value_dim) in the query's dtype, and how many document tokens each row attended
    to, (n_kv_heads, n_rows) int64. Batch of one; softcap and sink logits count as in dense attention.
    """
    _, n_query_heads, n_rows, head_dim = call.query.shape
    n_kv_heads, n_keys = call.key.shape[1:3]
    keys, values = call.key[0].float().transpose(1, 2), call.value[0].float()
    grouped = call.query[0].reshape(n_kv_heads, -1, n_rows, head_dim).transpose(1, 2)
    out = call.query.new_empty(n_kv_heads, n_rows, grouped.shape[2], values.shape[-1])
    attended = torch.empty(n_kv_heads, n_rows, dtype=torch.int64, device=keys.device)
    size = max(1, _BLOCK_FLOATS // (n_query_heads * n_keys))
    for start in range(0, n_rows, size):
        rows = slice(start, min(start + size, n_rows))
        query = grouped[:, rows].float() * call.scaling
        logits = cap(query.flatten(1, 2) @ keys, call.softcap).view(*query.shape[:3], n_keys)
        block = RowBlock(query, _masked(logits, call, rows), slice(span.head, span.tail))
        keep = selection.keep(block, budget)
        # the mask is written into the block's own logits: they are not needed after the choice
        block.logits[..., block.document].masked_fill_(~keep.unsqueeze(2), torch.finfo(torch.float32).min)
        weights = block.logits.softmax(-1)[..., :n_keys]
        out[:, rows] = (weights.flatten(1, 2) @ values).view(*query.shape[:3], -1).to(out.dtype)
        attended[:, rows] = keep.sum(-1)
    return out.transpose(1, 2).reshape(1, n_query_heads, n_rows, -1), attended


def _masked(logits: torch.Tensor, call: AttentionCall, rows: slice) -> torch.Tensor:
    """Hide what rows must not see and append the sink logits, if the model has some."""
    if call.mask is not None:
        logits = logits.masked_fill_(~call.mask[0, 0, rows][:, None], torch.finfo(torch.float32).min)
    if call.sinks is None:
        return logits
    sinks = call.sinks.float().reshape(logits.shape[0], 1, -1, 1)
    return torch.cat([logits, sinks.expand(-1, logits.shape[1], -1, -1)], dim=-1)


@dataclass(frozen=True)
class ClusterSelection:
    """Whole clusters in descending order of query . centroid (ClusterKV, arXiv 2412.03213).

    ``labels`` (n_kv_heads, n_document) int64; ``centroids`` (n_kv_heads, n_clusters, head_dim) float32;
    ``sizes`` (n_kv_heads, n_clusters) int64, 0 for a cluster that ended empty; ``pool`` one of `POOLS`.
    """

    labels: torch.Tensor
    centroids: torch.Tensor
    sizes: torch.Tensor
    pool: str

    @classmethod
    def of(cls, keys: torch.Tensor, *, tokens_per_cluster: int, iterations: int, pool: str) -> ClusterSelection:
        """Group the keys (n_kv_heads, n_document, head_dim) of one layer by direction: k-means with cosine distance.

        A centroid is the plain mean of its keys, as in the paper; the initial ones are evenly spaced keys, not random
        ones, so that nothing is drawn.
        """
        points, n_document = keys.float(), keys.shape[1]
        n_clusters = -(-n_document // tokens_per_cluster)
        spaced = (torch.arange(n_clusters, device=keys.device) * n_document) // n_clusters
        centroids = points[:, spaced + n_document // (2 * n_clusters)]
        labels = _nearest_direction(points, centroids)
        for _ in range(iterations):
            centroids = _means(points, labels, centroids)
            labels, previous = _nearest_direction(points, centroids), labels
            if torch.equal(labels, previous):
                break
        return cls(labels, _means(points, labels, centroids), group_sizes(labels, n_clusters), pool)

    @property
    def index_values(self) -> int:
        """The centroids of clusters that hold a token; lists of members are not counted."""
        return int((self.sizes > 0).sum()) * self.centroids.shape[-1]

    @property
    def resident_tokens(self) -> int:
        return self.labels.numel()

    def keep(self, block: RowBlock, budget: int) -> torch.Tensor:
        scores = _pooled(block.query @ self.centroids.unsqueeze(1).transpose(2, 3), self.pool)
        return _whole_groups(scores, self.labels, self.sizes, budget)


def _nearest_direction(points: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """Label by cosine: between unit vectors the smallest L2 distance is the largest cosine."""
    return assign(F.normalize(points, dim=-1), F.normalize(centroids, dim=-1))


def _means(points: torch.Tensor, labels: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """Mean of each cluster's points; an empty cluster keeps its centroid."""
    n_clusters = centroids.shape[1]
    sizes = group_sizes(labels, n_clusters).unsqueeze(-1)
    return torch.where(sizes > 0, group_sums(points, labels, n_clusters) / sizes.clamp_min(1), centroids)


@dataclass(frozen=True)
class PageSelection:
    """Whole pages of consecutive tokens in descending order of an upper bound of their logits (Quest, 2406.10774).

    ``minima`` and ``maxima`` (n_kv_heads, n_pages, head_dim) float32 over the keys of a page; ``labels``
    (n_kv_heads, n_document) and ``sizes`` (n_kv_heads, n_pages) int64; ``pool`` one of `POOLS`. Every layer is subject
    to the policy, whereas the paper leaves the first two dense.
    """

    minima: torch.Tensor
    maxima: torch.Tensor
    labels: torch.Tensor
    sizes: torch.Tensor
    pool: str

    @classmethod
    def of(cls, keys: torch.Tensor, *, page_tokens: int, pool: str) -> PageSelection:
        """Bound the pages of the keys (n_kv_heads, n_document, head_dim) of one layer; the last page may be short."""
        n_kv_heads, n_document, head_dim = keys.shape
        n_pages = -(-n_document // page_tokens)
        labels = (torch.arange(n_document, device=keys.device) // page_tokens).expand(n_kv_heads, -1)
        place = labels.unsqueeze(-1).expand(-1, -1, head_dim)
        empty = keys.new_zeros(n_kv_heads, n_pages, head_dim, dtype=torch.float32)
        minima, maxima = (
            empty.scatter_reduce(1, place, keys.float(), reduce, include_self=False) for reduce in ("amin", "amax")
        )
        return cls(minima, maxima, labels, group_sizes(labels, n_pages), pool)

    @property
    def index_values(self) -> int:
        return self.minima.numel() + self.maxima.numel()

    @property
    def resident_tokens(self) -> int:
        return self.labels.numel()

    def bounds(self, query: torch.Tensor) -> torch.Tensor:
        """Sum over dimensions of max(q min, q max): (n_kv_heads, n_rows, group, n_pages), no q.k of a page is above.

        `query` is (n_kv_heads, n_rows, group, head_dim). A positive coordinate takes the maximum and a negative one
        the minimum, which makes the sum two matrix products.
        """
        above = query.clamp_min(0) @ self.maxima.unsqueeze(1).transpose(2, 3)
        return above + query.clamp_max(0) @ self.minima.unsqueeze(1).transpose(2, 3)

    def keep(self, block: RowBlock, budget: int) -> torch.Tensor:
        return _whole_groups(_pooled(self.bounds(block.query), self.pool), self.labels, self.sizes, budget)


@dataclass(frozen=True)
class FixedSelection:
    """The same tokens for every row and question: ``kept`` (n_kv_heads, n_document) boolean. Nothing else is held."""

    kept: torch.Tensor

    @classmethod
    def last(cls, n_tokens: int, *, n_kv_heads: int, n_document: int, device: torch.device) -> FixedSelection:
        """Keep the last `n_tokens` of the document."""
        places = torch.arange(n_document, device=device)
        return cls((places >= n_document - n_tokens).expand(n_kv_heads, -1))

    @classmethod
    def heaviest(cls, mass: torch.Tensor, n_tokens: int) -> FixedSelection:
        """Keep the `n_tokens` with the largest `mass` (n_kv_heads, n_document), per KV head."""
        return cls(_top(mass, n_tokens))

    @property
    def index_values(self) -> int:
        return 0

    @property
    def resident_tokens(self) -> int:
        return int(self.kept.sum())

    def keep(self, block: RowBlock, budget: int) -> torch.Tensor:
        return self.kept.unsqueeze(1).expand(-1, block.query.shape[1], -1)


@dataclass(frozen=True)
class OracleSelection:
    """The tokens with the largest true attention mass: what dropping could reach at best, no system can know it.

    The choice is taken as free, so no index is counted. ``resident_tokens`` are all document tokens over KV heads.
    """

    resident_tokens: int
    index_values: int = 0

    def keep(self, block: RowBlock, budget: int) -> torch.Tensor:
        return _top(block.mass(), budget)


class MassMeter:
    """Drops nothing and adds up the attention that document tokens receive: ``mass`` (n_kv_heads, n_document)."""

    index_values = 0

    def __init__(self, *, n_kv_heads: int, n_document: int, device: torch.device) -> None:
        self.mass = torch.zeros(n_kv_heads, n_document, device=device)
        self.resident_tokens = self.mass.numel()

    def keep(self, block: RowBlock, budget: int) -> torch.Tensor:
        mass = block.mass()
        self.mass += mass.sum(1)
        return torch.ones_like(mass, dtype=torch.bool)


def _pooled(scores: torch.Tensor, pool: str) -> torch.Tensor:
    """(n_kv_heads, n_rows, group, n) over the query heads of the group: (n_kv_heads, n_rows, n)."""
    return scores.amax(2) if pool == "max" else scores.sum(2)


def _whole_groups(scores: torch.Tensor, labels: torch.Tensor, sizes: torch.Tensor, budget: int) -> torch.Tensor:
    """Tokens of the best groups until `budget` is reached, the last group whole: (n_kv_heads, n_rows, n_document)."""
    scores = scores.masked_fill(sizes.unsqueeze(1) == 0, -torch.inf)
    choice = choose_clusters(scores, sizes, Limit(tokens=budget), padded=False)
    hit = torch.zeros_like(scores, dtype=torch.bool).scatter_(2, choice.clusters, choice.kept)
    return hit.gather(2, labels.unsqueeze(1).expand(-1, scores.shape[1], -1))


def _top(mass: torch.Tensor, n_tokens: int) -> torch.Tensor:
    """Boolean, true at the `n_tokens` largest of the last dimension."""
    best = mass.topk(min(n_tokens, mass.shape[-1]), dim=-1).indices
    return torch.zeros_like(mass, dtype=torch.bool).scatter_(-1, best, True)
