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
    a place is not used; ``ends`` their running sum; ``tokens`` (n_kv_heads, n_rows) int64, recalled in all.
    """

    clusters: torch.Tensor
    sizes: torch.Tensor
    ends: torch.Tensor

    @property
    def tokens(self) -> torch.Tensor:
        return self.ends[..., -1]


class Observer(Protocol):
    """Receives what one block of rows recalled in one layer; None in its place costs nothing."""

    def on_recall(self, layer: ArchivedLayer, choice: Choice, unrecalled_mass: torch.Tensor) -> None: ...


def recall_attention(
    call: AttentionCall, layer: ArchivedLayer, budget: int, observer: Observer | None = None
) -> torch.Tensor:
    """Attend to archive and local keys: (batch, n_query_heads, n_rows, value_dim) in the query's dtype.

    `budget` is the number of archived tokens that each row recalls per KV head; the last cluster is recalled whole.
    """
    batch, n_query_heads, n_rows, head_dim = call.query.shape
    per_row = batch * n_query_heads * (layer.keys.shape[1] + call.key.shape[2])
    if layer.recall is not None:
        width = min(budget + layer.recall.largest, layer.recall.n_tokens)
        per_row = max(per_row, batch * layer.keys.shape[0] * width * 2 * head_dim)
    block = max(1, _BLOCK_FLOATS // max(1, per_row))
    if block >= n_rows:
        return _attend_rows(call, layer, budget, slice(0, n_rows), observer)
    starts = range(0, n_rows, block)
    parts = [_attend_rows(call, layer, budget, slice(at, min(at + block, n_rows)), observer) for at in starts]
    return torch.cat(parts, dim=2)


def choose_clusters(mass: torch.Tensor, sizes: torch.Tensor, budget: int) -> Choice:
    """Take whole clusters in descending order of `mass` until `budget` tokens are reached.

    `mass` (n_kv_heads, n_rows, n_clusters), `sizes` (n_kv_heads, n_clusters).
    """
    clusters = mass.topk(min(mass.shape[-1], budget), dim=-1).indices
    held = sizes.unsqueeze(1).expand(-1, mass.shape[1], -1).gather(2, clusters)
    held *= held.cumsum(-1) - held < budget
    return Choice(clusters=clusters, sizes=held, ends=held.cumsum(-1))


def gather_rows(table: RecallTables, choice: Choice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fetch the keys and values of the chosen clusters from the payload.

    Returns keys and values (n_kv_heads, n_rows, width, dim) in the payload's dtype, and a boolean (n_kv_heads,
    n_rows, width) that is true for real tokens: rows that recall fewer tokens than the widest are filled up.
    """
    n_kv_heads, n_rows, _ = choice.clusters.shape
    width = max(1, int(choice.tokens.max()))
    slots = torch.arange(width, device=choice.ends.device)
    wanted = torch.minimum(slots, choice.tokens.unsqueeze(-1) - 1)  # filled up with the last token: bytes stay numbers
    place = torch.searchsorted(choice.ends, wanted, right=True)
    before = choice.ends - choice.sizes

    def fetch(address: torch.Tensor, dim: int) -> torch.Tensor:
        n_bytes = dim * table.payload_dtype.itemsize
        start = address.unsqueeze(1).expand(-1, n_rows, -1).gather(2, choice.clusters) - before * n_bytes
        byte = start.gather(2, place) + wanted * n_bytes
        runs = table.payload.as_strided((table.payload.shape[0] - n_bytes + 1, n_bytes), (1, 1))
        raw = runs.index_select(0, byte.view(-1).to(table.payload.device))  # a run of bytes may start anywhere
        return raw.view(table.payload_dtype).view(n_kv_heads, n_rows, width, dim).to(slots.device)

    keys = fetch(table.key_address, table.key_dim)
    return keys, fetch(table.value_address, table.value_dim), slots < choice.tokens.unsqueeze(-1)


def _attend_rows(
    call: AttentionCall, layer: ArchivedLayer, budget: int, rows: slice, observer: Observer | None
) -> torch.Tensor:
    """Attention of some rows: (batch, n_query_heads, rows, value_dim)."""
    view = _RowView(call, layer.keys.shape[0], rows)
    n_held = layer.keys.shape[1]
    weights = torch.cat([view.shared_logits(layer.keys, layer.bias), view.local_logits()], dim=-1)
    peak = weights.amax(-1, keepdim=True)  # (n_kv_heads, n_rows, group, 1)
    if view.sinks is not None:
        peak = torch.maximum(peak, view.sinks)
    weights = weights.sub_(peak).exp_()
    total = weights.sum(-1, keepdim=True)
    if view.sinks is not None:
        total = total + (view.sinks - peak).exp()
    table = layer.recall
    if table is None:
        attended = view.shared_product(weights[..., :n_held], layer.values)
        return view.unpack((attended + view.local_product(weights[..., n_held:])) / total)
    far = weights[..., : table.n_clusters]
    choice = choose_clusters((far / total).sum(2), table.sizes, budget)
    keys, values, real = gather_rows(table, choice)
    logits = cap(view.query @ keys.float().transpose(-1, -2), call.softcap)
    logits.masked_fill_(~real.unsqueeze(2), -torch.inf)
    raised = torch.maximum(peak, logits.amax(-1, keepdim=True))
    logits = logits.sub_(raised).exp_()
    hit = torch.zeros_like(far[:, :, 0], dtype=torch.bool).scatter_(2, choice.clusters, choice.sizes > 0).unsqueeze(2)
    total = total - (far * hit).sum(-1, keepdim=True)
    far.masked_fill_(hit, 0.0)
    shrink = (peak - raised).exp_()
    attended = view.shared_product(weights[..., :n_held], layer.values) + view.local_product(weights[..., n_held:])
    total = total * shrink + logits.sum(-1, keepdim=True)
    attended = attended * shrink + logits @ values.float()
    if observer is not None:
        estimated = far.sum(-1, keepdim=True) * shrink
        observer.on_recall(layer, choice, (estimated / total).mean(dim=(2, 3)))
    return view.unpack(attended / total)


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
        self.sinks = None if call.sinks is None else call.sinks.float().reshape(self.heads, 1, self.group, 1)
        self._call, self._rows = call, rows

    def shared_logits(self, keys: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Logits against keys that all rows share (n_kv_heads, n, head_dim): (n_kv_heads, n_rows, group, n)."""
        flat = self.query.view(self.heads, -1, self.query.shape[-1])
        logits = cap(torch.bmm(flat, keys.float().transpose(1, 2)), self._call.softcap)
        logits = logits if bias is None else logits.add_(bias.unsqueeze(1))
        return logits.view(*self.query.shape[:3], -1)

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

    def shared_product(self, weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Weighted sum of values that all rows share: (n_kv_heads, n_rows, group, value_dim)."""
        return torch.bmm(weights.flatten(1, 2), values.float()).view(*weights.shape[:3], -1)

    def local_product(self, weights: torch.Tensor) -> torch.Tensor:
        """Weighted sum of each sequence's local values: (n_kv_heads, n_rows, group, value_dim)."""
        by_sequence = weights.reshape(self.heads, self.batch, self.rows * self.group, -1).transpose(0, 1)
        out = by_sequence @ self._call.value.float()  # (batch, n_kv_heads, rows * group, value_dim)
        return out.transpose(0, 1).reshape(*weights.shape[:3], -1)

    def unpack(self, attended: torch.Tensor) -> torch.Tensor:
        """Back to the model's layout and dtype: (batch, n_query_heads, rows, value_dim)."""
        grouped = attended.view(self.heads, self.batch, self.rows, self.group, -1).permute(1, 0, 3, 2, 4)
        return grouped.reshape(self.batch, self.heads * self.group, self.rows, -1).to(self._call.query.dtype)
