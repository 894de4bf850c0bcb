"""The query rows of one attention call, laid out for attention over keys that all rows share."""

from __future__ import annotations

import torch

from ragkv.model.attention import AttentionCall, cap


class RowView:
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

    def local_sum(self, weights: torch.Tensor) -> torch.Tensor:
        """Weighted sum of each sequence's local values: (n_kv_heads, n_rows, group, value_dim)."""
        by_sequence = weights.reshape(self.heads, self.batch, self.rows * self.group, -1).transpose(0, 1)
        out = by_sequence @ self._call.value.float()  # (batch, n_kv_heads, rows * group, value_dim)
        return out.transpose(0, 1).reshape(*weights.shape[:3], -1)

    def unpack(self, attended: torch.Tensor) -> torch.Tensor:
        """Back to the model's layout and dtype: (batch, n_query_heads, rows, value_dim)."""
        grouped = attended.view(self.heads, self.batch, self.rows, self.group, -1).permute(1, 0, 3, 2, 4)
        return grouped.reshape(self.batch, self.heads * self.group, self.rows, -1).to(self._call.query.dtype)
