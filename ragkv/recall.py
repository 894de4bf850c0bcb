"""Attention over an archive: score prototypes, recall whole clusters, estimate the rest, all heads at once.

Every row (one query token of one sequence) chooses its own clusters per KV head: by the softmax mass that the query
heads of the group put on a prototype, raised by how far their logits spread inside the cluster. A cluster that is not
recalled takes part as one pseudo-token with the centroid as key, the mean value as value, and log(size) plus a small
correction for the spread of the cluster added to the logit. With every cluster recalled the result is dense attention
over the keys and values as they are stored.

Coded tokens are never decoded: their logit is the prototype's plus the product of the transformed query with the codes,
and the weighted sum of value codes is transformed back once per row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from ragkv.attention import AttentionCall, cap
from ragkv.layers import ArchivedLayer, RecallTables
from ragkv.payload import Numbers, Payload
from ragkv.policy import Limit
from ragkv.spread import logit_deviation

_FEWEST, _TOKENS_OF_A_CLUSTER = 16, 4  # clusters looked at first: sorting all takes twice as long
_MAX_DEVIATION = 60.0  # its exponential still fits float32
_BLOCK_FLOATS = 1 << 22  # logits or recalled values held at once; longer questions are attended in blocks of rows


@dataclass(frozen=True)
class Choice:
    """Clusters that rows recall.

    ``clusters`` (n_kv_heads, n_rows, n_candidates) int64 in descending order of mass, of which the `kept` ones
    (boolean, a leading run) are recalled; ``begins`` and ``ends`` bound their tokens in that order; ``tokens``
    (n_kv_heads, n_rows) int64, recalled in all.
    """

    clusters: torch.Tensor
    kept: torch.Tensor
    begins: torch.Tensor
    ends: torch.Tensor
    tokens: torch.Tensor

    def hit_ids(self) -> torch.Tensor:
        """Ids of the clusters recalled, (n_kv_heads, n_rows, n_candidates), -1 where a candidate was not."""
        return torch.where(self.kept & (self.ends > self.begins), self.clusters, -1)


@dataclass(frozen=True)
class Recalled:
    """Tokens that rows recall, filled up to the row with most.

    ``rows`` (n_kv_heads, n_rows, width, row_bytes) uint8; ``real`` (n_kv_heads, n_rows, width) boolean, true for
    tokens that are not filling; ``cluster`` (n_kv_heads, n_rows, width) int64 that each token is of.
    """

    rows: torch.Tensor
    real: torch.Tensor
    cluster: torch.Tensor


class Observer(Protocol):
    """Receives what one block of rows recalled in one layer; None in its place costs nothing.

    `begins` is true for the first block of a call.
    """

    def on_recall(
        self, layer: ArchivedLayer, choice: Choice, unrecalled_mass: torch.Tensor, *, begins: bool
    ) -> None: ...


def recall_attention(
    call: AttentionCall, layer: ArchivedLayer, limit: Limit, observer: Observer | None = None
) -> torch.Tensor:
    """Attend to archive and local keys: (batch, n_query_heads, n_rows, value_dim) in the query's dtype.

    `limit` says what each row recalls per KV head; the last cluster is recalled whole.
    """
    batch, n_query_heads, n_rows, head_dim = call.query.shape
    per_row = batch * n_query_heads * (layer.keys.shape[1] + call.key.shape[2])
    if layer.recall is not None:
        width = min(limit.tokens, limit.candidates(layer.recall.n_clusters) * layer.recall.largest)
        width = min(width + layer.recall.largest, layer.recall.n_tokens)
        per_row = max(per_row, batch * layer.keys.shape[0] * width * 2 * head_dim)
    block = max(1, _BLOCK_FLOATS // max(1, per_row))
    if block >= n_rows:
        return _attend_rows(call, layer, limit, slice(0, n_rows), observer)
    starts = range(0, n_rows, block)
    parts = [_attend_rows(call, layer, limit, slice(at, min(at + block, n_rows)), observer) for at in starts]
    return torch.cat(parts, dim=2)


def choose_clusters(
    worth: torch.Tensor, sizes: torch.Tensor, limit: Limit, *, mass: torch.Tensor | None = None, padded: bool = True
) -> Choice:
    """Take whole clusters in descending order of `worth` until the limit is reached.

    `worth` and `mass` (n_kv_heads, n_rows, n_clusters): what a cluster is worth, and its estimated share of the
    attention, which is `worth` by default and only looked at if the limit is one of mass; `sizes` (n_kv_heads,
    n_clusters); `padded` says that some sizes are 0.
    """
    mass = worth if mass is None else mass
    if padded:  # behind real clusters whose mass underflowed to 0
        worth = worth.masked_fill(sizes.unsqueeze(1) == 0, -1)
    most = limit.candidates(worth.shape[-1])
    few = most if limit.clusters is not None else min(most, max(_FEWEST, limit.tokens // _TOKENS_OF_A_CLUSTER))
    clusters, held = _best(worth, sizes, few)
    ends = held.cumsum(-1)
    if few < most and bool((ends[..., -1] < limit.tokens).any()):  # clusters are small here: look at all
        clusters, held = _best(worth, sizes, most)
        ends = held.cumsum(-1)
    begins = ends - held
    kept = begins < limit.tokens
    if limit.mass is not None:
        taken = mass.gather(2, clusters)
        left = mass.sum(-1, keepdim=True) - (taken.cumsum(-1) - taken)  # estimated before each is taken
        kept &= (begins < limit.floor) | (left > 1 - limit.mass)
    return Choice(clusters, kept, begins, ends, tokens=(held * kept).sum(-1))


def _best(worth: torch.Tensor, sizes: torch.Tensor, n_best: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `n_best` clusters of each row in descending order, and their sizes."""
    clusters = worth.topk(n_best, dim=-1).indices
    return clusters, sizes.unsqueeze(1).expand(-1, worth.shape[1], -1).gather(2, clusters)


def gather_rows(table: RecallTables, choice: Choice) -> Recalled:
    """Fetch the rows of the chosen clusters; every row of a query recalls at least one cluster."""
    n_kv_heads, n_rows, _ = choice.clusters.shape
    slots = torch.arange(int(choice.tokens.max()), device=choice.ends.device)
    tokens = choice.tokens.unsqueeze(-1)
    wanted = torch.minimum(slots, tokens - 1)  # filled up with the last token, so that all bytes are real numbers
    place = torch.searchsorted(choice.ends, wanted, right=True)
    start = table.address.unsqueeze(1).expand(-1, n_rows, -1).gather(2, choice.clusters)
    start -= choice.begins * table.row_bytes
    byte = start.gather(2, place).add_(wanted, alpha=table.row_bytes).view(-1)
    n_starts = table.mapped.shape[0] - table.row_bytes + 1
    runs = table.mapped.as_strided((n_starts, table.row_bytes), (1, 1))  # a row may start at any byte of the file
    raw = runs.index_select(0, byte.to(table.mapped.device)).to(slots.device)
    return Recalled(
        rows=raw.view(n_kv_heads, n_rows, slots.shape[0], -1),
        real=slots < tokens,
        cluster=choice.clusters.gather(2, place),
    )


def _attend_rows(
    call: AttentionCall, layer: ArchivedLayer, limit: Limit, rows: slice, observer: Observer | None
) -> torch.Tensor:
    """Attention of some rows: (batch, n_query_heads, rows, value_dim)."""
    view = _RowView(call, layer.keys.shape[0], rows)
    n_held, n_local = layer.keys.shape[1], call.key.shape[2]
    table, recalled = layer.recall, None
    products = view.shared_products(layer.keys)
    held = cap(products, call.softcap)
    held = held if layer.bias is None else held + layer.bias[:, None, None]
    parts = [held, view.local_logits()]
    if view.sinks is not None:
        parts.append(view.sinks)
    logits = torch.cat(parts, dim=-1)  # (n_kv_heads, n_rows, group, n_held + n_local (+ 1))
    if table is not None:
        mass = logits.softmax(-1)[..., : table.n_clusters]
        worth = _worth(view.query, table, mass)
        share = None if limit.mass is None else mass.mean(2)
        choice = choose_clusters(worth, table.sizes, limit, mass=share, padded=table.padded)
        recalled = gather_rows(table, choice)
        near = cap(_near_products(view.query, table.payload, recalled, products), call.softcap)
        near = near.masked_fill(~recalled.real.unsqueeze(2), -torch.inf)
        hit = torch.zeros_like(worth, dtype=torch.bool).scatter_(2, choice.clusters, choice.kept)
        logits[..., : table.n_clusters].masked_fill_(hit.unsqueeze(2), -torch.inf)
        logits = torch.cat([logits, near], dim=-1)
    weights = logits.softmax(-1)
    attended = view.shared_sum(weights[..., :n_held], layer.values)
    attended += view.local_sum(weights[..., n_held : n_held + n_local])
    if table is not None and recalled is not None:
        attended += _near_sum(weights[..., -recalled.real.shape[2] :], table.payload, recalled)
        if observer is not None:
            estimated = weights[..., : table.n_clusters].sum(-1)
            observer.on_recall(layer, choice, estimated.mean(2), begins=rows.start == 0)
    return view.unpack(attended)


def _worth(query: torch.Tensor, table: RecallTables, mass: torch.Tensor) -> torch.Tensor:
    """What recalling each cluster is worth to each row: (n_kv_heads, n_rows, n_clusters).

    The `mass` (n_kv_heads, n_rows, group, n_clusters) that the cluster would have if all its keys were one standard
    deviation of the logit nearer to the query than their centroid, times its priority. A cluster that may hide a sharp
    match comes before a flat one of the same mass.
    """
    deviation = logit_deviation(query.flatten(1, 2), table.axes, table.axis_variances)
    reached = deviation.clamp_max_(_MAX_DEVIATION).exp_().view_as(mass).mul_(mass)
    return reached.sum(2).mul_(table.priority.unsqueeze(1))


def _near_products(query: torch.Tensor, payload: Payload, recalled: Recalled, products: torch.Tensor) -> torch.Tensor:
    """Products of queries (n_kv_heads, n_rows, group, head_dim) with recalled keys: (n_kv_heads, n_rows, group, width).

    `products` are those with the centroids, which the products of residuals add to.
    """
    keys, basis = payload.keys(recalled.rows), payload.key_basis
    if basis is None:
        return query @ keys.numbers.transpose(-1, -2)
    along = torch.bmm(query.flatten(1, 2), basis.logit_rows).view(*query.shape[:3], -1)
    own = along @ keys.numbers.transpose(-1, -2)
    base = products.gather(3, recalled.cluster.unsqueeze(2).expand(-1, -1, query.shape[2], -1))
    return base.add_(_scaled(own, keys))


def _near_sum(weights: torch.Tensor, payload: Payload, recalled: Recalled) -> torch.Tensor:
    """Recalled values summed with `weights` (n_kv_heads, n_rows, group, width): (..., group, value_dim)."""
    values, basis = payload.values(recalled.rows), payload.value_basis
    summed = _scaled(weights, values) @ values.numbers
    if basis is None:
        return summed
    sums = torch.cat([summed, weights.sum(-1, keepdim=True)], dim=-1)
    return torch.bmm(sums.flatten(1, 2), basis.sum_rows).view(*weights.shape[:3], -1)


def _scaled(weights: torch.Tensor, numbers: Numbers) -> torch.Tensor:
    """(n_kv_heads, n_rows, group, width) times the scale of each token."""
    return weights if numbers.scale is None else weights * numbers.scale.unsqueeze(2)


class _RowView:
    """The query rows of one block, laid out so that the query heads of a group are rows of their KV head.

    ``query`` (n_kv_heads, n_rows, group, head_dim) float32, scaled; rows count sequences first, then tokens.
    """

    def __init__(self, call: AttentionCall, n_kv_heads: int, rows: slice) -> None:
        query = call.query[:, :, rows]
        self.batch, n_query_heads, self.rows, dim = query.shape
        self.heads, self.group = n_kv_heads, n_query_heads // n_kv_heads
        grouped = query.reshape(self.batch, self.heads, self.group, self.rows, dim).permute(1, 0, 3, 2, 4)
        self.query = grouped.float().mul(call.scaling).reshape(self.heads, -1, self.group, dim).contiguous()
        self.sinks: torch.Tensor | None = None
        if call.sinks is not None:
            sinks = call.sinks.float().reshape(self.heads, 1, self.group, 1)
            self.sinks = sinks.expand(-1, self.query.shape[1], -1, -1)
        self._call, self._rows = call, rows

    def shared_products(self, keys: torch.Tensor) -> torch.Tensor:
        """Products with keys that all rows share (n_kv_heads, n, head_dim): (n_kv_heads, n_rows, group, n)."""
        flat = self.query.view(self.heads, -1, self.query.shape[-1])
        return torch.bmm(flat, keys.float().transpose(1, 2)).view(*self.query.shape[:3], -1)

    def local_logits(self) -> torch.Tensor:
        """Masked logits against the local keys of each sequence: (n_kv_heads, n_rows, group, n_local)."""
        keys = self._call.key.float().transpose(2, 3)  # (batch, n_kv_heads, head_dim, n_local)
        by_sequence = self.query.view(self.heads, self.batch, self.rows * self.group, -1).transpose(0, 1)
        logits = cap(by_sequence @ keys, self._call.softcap)
        if self._call.mask is not None:
            mask = self._call.mask[:, :, self._rows]  # (batch or 1, 1, rows, n_local)
            logits = logits.view(self.batch, self.heads, self.rows, self.group, -1)
            logits = logits.masked_fill_(~mask.unsqueeze(3), -torch.inf)
        return logits.transpose(0, 1).reshape(*self.query.shape[:3], -1)

    def shared_sum(self, weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Weighted sum of values that all rows share: (n_kv_heads, n_rows, group, value_dim)."""
        return torch.bmm(weights.flatten(1, 2), values.float()).view(*weights.shape[:3], -1)

    def local_sum(self, weights: torch.Tensor) -> torch.Tensor:
        """Weighted sum of each sequence's local values: (n_kv_heads, n_rows, group, value_dim)."""
        by_sequence = weights.reshape(self.heads, self.batch, self.rows * self.group, -1).transpose(0, 1)
        out = by_sequence @ self._call.value.float()  # (batch, n_kv_heads, rows * group, value_dim)
        return out.transpose(0, 1).reshape(*weights.shape[:3], -1)

    def unpack(self, attended: torch.Tensor) -> torch.Tensor:
        """Back to the model's layout and dtype: (batch, n_query_heads, rows, value_dim)."""
        grouped = attended.view(self.heads, self.batch, self.rows, self.group, -1).permute(1, 0, 3, 2, 4)
        return grouped.reshape(self.batch, self.heads * self.group, self.rows, -1).to(self._call.query.dtype)
