"""Attention over an archive: score prototypes, recall whole clusters, estimate the rest, all heads at once.

Every row (one query token of one sequence) chooses its own clusters per KV head, by the softmax mass that the query
heads of the group put on the prototypes. A cluster that is not recalled takes part as one pseudo-token with the
centroid as key, the mean value as value and the additive logit log(size). By Jensen's inequality that is a
lower bound of its true mass; with every cluster recalled the result is dense attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from ragkv.archive import ArchivedLayer, RecallTables
from ragkv.attention import AttentionCall, cap

_BLOCK_FLOATS = 1 << 22  # logits or recalled values held at once; longer questions are attended in blocks of rows


@dataclass(frozen=True)
class Choice:
    """Clusters that rows recall.

    ``clusters`` (n_kv_heads, n_rows, n_chosen) int64 in descending order of mass; ``sizes`` like it, int64, 0 where
    a place is not used; ``first`` (exclusive) running sum of sizes.
    """

    clusters: torch.Tensor
    sizes: torch.Tensor
    first: torch.Tensor

    @property
    def tokens(self) -> torch.Tensor:
        """Tokens recalled, (n_kv_heads, n_rows) int64."""
        return self.first[..., -1] + self.sizes[..., -1]


class Observer(Protocol):
    """Receives what one block of rows recalled in one layer; None in its place costs nothing."""

    def on_recall(self, layer: ArchivedLayer, choice: Choice, unrecalled_mass: torch.Tensor) -> None: ...


def recall_attention(
    call: AttentionCall, layer: ArchivedLayer, budget: int, observer: Observer | None = None
) -> torch.Tensor:
    """Attend to archive and local keys: (batch, n_query_heads, n_rows, value_dim) in the query's dtype.

    `budget` is the number of archived tokens that each row recalls per KV head; the last cluster is recalled whole.
    """
    batch, n_query_heads, n_rows, _ = call.query.shape
    n_kv_heads, n_exact = layer.exact_keys.shape[:2]
    per_row = batch * n_query_heads * (n_exact + call.key.shape[2])
    if layer.recall is not None:
        table = layer.recall
        n_clusters, width = table.centroids.shape[1], min(budget + table.largest, _archived_tokens(table))
        per_row = max(
            per_row + batch * n_query_heads * n_clusters, batch * n_kv_heads * width * 2 * call.query.shape[-1]
        )
    block = max(1, _BLOCK_FLOATS // max(1, per_row))
    parts = [
        _attend_rows(call, layer, budget, slice(start, min(start + block, n_rows)), observer)
        for start in range(0, n_rows, block)
    ]
    attended = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
    return attended.to(call.query.dtype)


def choose_clusters(mass: torch.Tensor, sizes: torch.Tensor, budget: int) -> Choice:
    """Take whole clusters in descending order of `mass` until `budget` tokens are reached.

    `mass` (n_kv_heads, n_rows, n_clusters), `sizes` (n_kv_heads, n_clusters).
    """
    n_chosen = min(mass.shape[-1], max(1, budget))
    clusters = mass.topk(n_chosen, dim=-1).indices
    held = sizes.unsqueeze(1).expand(-1, mass.shape[1], -1).gather(2, clusters).long()
    held = torch.where(held.cumsum(-1) - held < budget, held, 0)
    return Choice(clusters=clusters, sizes=held, first=held.cumsum(-1) - held)


def gather_rows(table: RecallTables, choice: Choice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fetch the keys and values of the chosen clusters from the payload.

    Returns keys and values (n_kv_heads, n_rows, width, dim) in the payload's dtype, and a boolean (n_kv_heads,
    n_rows, width) that is true for real tokens: rows that recall fewer tokens are filled up.
    """
    n_kv_heads, n_rows, _ = choice.clusters.shape
    tokens = choice.tokens
    width = max(1, int(tokens.max()))
    slots = torch.arange(width, device=tokens.device)
    place = torch.searchsorted(choice.first + choice.sizes, slots.expand(n_kv_heads, n_rows, width).contiguous(), right=True)
    place = place.clamp_max(choice.clusters.shape[-1] - 1)
    real = slots < tokens.unsqueeze(-1)
    inside = torch.where(real, slots - choice.first.gather(2, place), 0)
    cluster = choice.clusters.gather(2, place)

    def fetch(address: torch.Tensor, dim: int) -> torch.Tensor:
        n_bytes = dim * table.payload_dtype.itemsize
        byte = address.unsqueeze(1).expand(-1, n_rows, -1).gather(2, cluster) + inside * n_bytes
        windows = table.payload.as_strided((table.payload.shape[0] - n_bytes + 1, n_bytes), (1, 1))
        raw = windows.index_select(0, byte.reshape(-1).to(table.payload.device))
        return raw.view(table.payload_dtype).view(n_kv_heads, n_rows, width, dim).to(tokens.device)

    return (
        fetch(table.key_address, table.centroids.shape[-1]),
        fetch(table.value_address, table.mean_values.shape[-1]),
        real,
    )


def _attend_rows(
    call: AttentionCall, layer: ArchivedLayer, budget: int, rows: slice, observer: Observer | None
) -> torch.Tensor:
    """Attention of some rows: (batch, n_query_heads, rows, value_dim) float32."""
    scorer = _Scorer(call, layer, rows)
    exact, local = scorer.against(layer.exact_keys), scorer.against_local()
    peak = torch.maximum(exact.amax(-1, keepdim=True), local.amax(-1, keepdim=True))  # (heads, rows, group, 1)
    if scorer.sinks is not None:
        peak = torch.maximum(peak, scorer.sinks)
    recalled: tuple[torch.Tensor, torch.Tensor] | None = None
    far = None
    if layer.recall is not None:
        table = layer.recall
        far = scorer.against(table.centroids) + table.log_sizes[:, None, None]
        peak = torch.maximum(peak, far.amax(-1, keepdim=True))
        far = (far - peak).exp_()
        near = (exact - peak).exp().sum(-1, keepdim=True) + (local - peak).exp().sum(-1, keepdim=True)
        if scorer.sinks is not None:
            near = near + (scorer.sinks - peak).exp()
        choice = choose_clusters((far / (near + far.sum(-1, keepdim=True))).sum(2), table.sizes, budget)
        keys, values, real = gather_rows(table, choice)
        logits = cap(scorer.query @ keys.float().transpose(-1, -2), call.softcap)
        logits.masked_fill_(~real.unsqueeze(2), -torch.inf)
        raised = torch.maximum(peak, logits.amax(-1, keepdim=True))
        hit = torch.zeros(far.shape[0], far.shape[1], far.shape[3], dtype=torch.bool, device=far.device)
        hit.scatter_(2, choice.clusters, choice.sizes > 0)
        far = far.masked_fill_(hit.unsqueeze(2), 0.0).mul_((peak - raised).exp_())
        peak = raised
        recalled = (logits.sub_(peak).exp_(), values)
    exact, local = exact.sub_(peak).exp_(), local.sub_(peak).exp_()
    total = exact.sum(-1, keepdim=True) + local.sum(-1, keepdim=True)
    attended = scorer.flat_product(exact, layer.exact_values) + scorer.local_product(local)
    if scorer.sinks is not None:
        total = total + (scorer.sinks - peak).exp()
    if layer.recall is not None and far is not None and recalled is not None:
        estimated = far.sum(-1, keepdim=True)
        total = total + estimated + recalled[0].sum(-1, keepdim=True)
        attended = attended + scorer.flat_product(far, layer.recall.mean_values) + recalled[0] @ recalled[1].float()
        if observer is not None:
            observer.on_recall(layer, choice, (estimated / total).mean(dim=(2, 3)))
    return scorer.unpack(attended / total)


class _Scorer:
    """The query rows of one block, laid out so that the query heads of a group are rows of their KV head.

    ``query`` (n_kv_heads, n_rows, group, head_dim) float32, scaled; rows count sequences first, then tokens.
    """

    def __init__(self, call: AttentionCall, layer: ArchivedLayer, rows: slice) -> None:
        query = call.query[:, :, rows]
        self.batch, n_query_heads, self.rows, dim = query.shape
        self.heads = layer.exact_keys.shape[0]
        self.group = n_query_heads // self.heads
        grouped = query.reshape(self.batch, self.heads, self.group, self.rows, dim).permute(1, 0, 3, 2, 4)
        flat = grouped.reshape(self.heads, self.batch * self.rows, self.group, dim)
        self.query = (flat.float() * call.scaling).contiguous()
        self.sinks = None if call.sinks is None else call.sinks.float().reshape(self.heads, 1, self.group, 1)
        self._call, self._rows = call, rows

    def against(self, keys: torch.Tensor) -> torch.Tensor:
        """Logits against keys that all rows share (n_kv_heads, n, head_dim): (n_kv_heads, n_rows, group, n)."""
        flat = self.query.reshape(self.heads, -1, self.query.shape[-1])
        logits = torch.bmm(flat, keys.float().transpose(1, 2))
        return cap(logits, self._call.softcap).view(*self.query.shape[:3], -1)

    def against_local(self) -> torch.Tensor:
        """Masked logits against the local keys of each sequence: (n_kv_heads, n_rows, group, n_local)."""
        keys = self._call.key.float().transpose(2, 3)  # (batch, n_kv_heads, head_dim, n_local)
        by_sequence = self.query.view(self.heads, self.batch, self.rows * self.group, -1).transpose(0, 1)
        logits = cap(by_sequence @ keys, self._call.softcap)
        mask = self._call.mask
        mask = mask[:, :, self._rows] if mask.shape[2] > 1 else mask  # (batch or 1, 1, rows or 1, n_local)
        logits = logits.view(self.batch, self.heads, self.rows, self.group, -1)
        logits = logits.masked_fill(~mask.unsqueeze(3), -torch.inf)
        return logits.transpose(0, 1).reshape(*self.query.shape[:3], -1)

    def flat_product(self, weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Weighted sum of values that all rows share: (n_kv_heads, n_rows, group, value_dim)."""
        flat = weights.reshape(self.heads, -1, weights.shape[-1])
        return torch.bmm(flat, values.float()).view(*weights.shape[:3], -1)

    def local_product(self, weights: torch.Tensor) -> torch.Tensor:
        """Weighted sum of each sequence's local values: (n_kv_heads, n_rows, group, value_dim)."""
        by_sequence = weights.view(self.heads, self.batch, self.rows * self.group, -1).transpose(0, 1)
        out = by_sequence @ self._call.value.float()  # (batch, n_kv_heads, rows * group, value_dim)
        return out.transpose(0, 1).reshape(*weights.shape[:3], -1)

    def unpack(self, attended: torch.Tensor) -> torch.Tensor:
        """Back to the model's layout: (batch, n_query_heads, rows, value_dim)."""
        grouped = attended.view(self.heads, self.batch, self.rows, self.group, -1).permute(1, 0, 3, 2, 4)
        return grouped.reshape(self.batch, self.heads * self.group, self.rows, -1)


def _archived_tokens(table: RecallTables) -> int:
    return table.payload.shape[0] // table.row_bytes + 1
