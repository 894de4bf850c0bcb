"""The attention that a model runs once ragkv is attached: stock without an archive, recall with one.

A cache layer tags the key tensor that it returns; the function registered here reads the tag. Without a tag it
is the stock SDPA function (or the model's softcap / sink arithmetic, which SDPA lacks), so an attached model answers
ordinary calls as before. Nothing is patched and nothing happens at import.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ragkv.errors import ConfigError
from ragkv.model.prefill import fork_cache

NAME = "ragkv"
_TAG = "_ragkv_archived"
_SCORE_FLOATS = 1 << 24  # attention weights held at once by the softcap / sink arithmetic


class ArchivedAttention(Protocol):
    """What a cache layer ties to its keys: attention over the archive and the local keys together."""

    def attend(self, call: AttentionCall) -> torch.Tensor: ...


class AttentionCall:
    """One call of a layer's attention, as the model makes it.

    ``query`` (batch, n_query_heads, n_rows, head_dim); ``key`` and ``value`` (batch, n_kv_heads, n_local, head_dim);
    ``mask`` boolean (batch or 1, 1, n_rows, n_local), None only for one row that sees all of them;
    ``positions`` (batch, n_rows) or None; ``sinks`` (n_query_heads,) logits or None; ``config`` that of the
    calling model, the object itself.
    """

    __slots__ = ("config", "key", "mask", "positions", "query", "scaling", "sinks", "softcap", "value")

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        mask: torch.Tensor | None,
        scaling: float | None,
        positions: torch.Tensor | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        config: object | None = None,
    ) -> None:
        self.query, self.key, self.value = query, key, value
        self.mask = causal_mask(query, key) if mask is None and query.shape[2] > 1 else mask
        self.scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        self.positions, self.softcap, self.sinks, self.config = positions, softcap, sinks, config


def attach(model: PreTrainedModel) -> PreTrainedModel:
    """Let `model` answer from archives: register ragkv's attention and select it in the model's configuration.

    Weights and code stay as they are, and calls without an archive behave as stock SDPA attention. Attaching twice
    is harmless. Returns the same model.

    Raises
    ------
    ConfigError
        If the model does not allow its attention to be chosen.
    """
    AttentionInterface.register(NAME, _attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    if not is_attached(model):
        raise ConfigError(
            f"{type(model).__name__} does not let its attention be chosen; ragkv cannot be attached to it"
        )
    return model


def is_attached(model: PreTrainedModel) -> bool:
    return bool(model.config._attn_implementation == NAME)


def tag(key: torch.Tensor, archived: ArchivedAttention) -> torch.Tensor:
    """Tie an archived layer to the key tensor that a cache layer returns to the model."""
    setattr(key, _TAG, archived)
    return key


class TiedCache(DynamicCache):
    """A view of a prefilled cache whose layers grow on their own, and whose keys carry what attends to them.

    `ties` by layer index; other layers attend as usual.
    """

    def __init__(self, cache: DynamicCache, ties: Mapping[int, ArchivedAttention]) -> None:
        super().__init__()
        self.layers = fork_cache(cache).layers
        self.layer_class_to_replicate = None
        self._ties = ties

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        tie = self._ties.get(layer_idx)
        return (keys if tie is None else tag(keys.view_as(keys), tie)), values


def causal_mask(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """(1, 1, n_rows, n_local) boolean: the last n_rows keys are the rows' own (transformers skips this mask)."""
    n_rows, n_local = query.shape[2], key.shape[2]
    ones = torch.ones(n_rows, n_local, dtype=torch.bool, device=query.device)
    return ones.tril(n_local - n_rows)[None, None]


def _attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    **stock: Any,
) -> tuple[torch.Tensor, None]:
    archived: ArchivedAttention | None = getattr(key, _TAG, None)
    if archived is None and softcap is None and s_aux is None:
        stock.pop("sliding_window", None)
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **stock)
    call = AttentionCall(
        query,
        key,
        value,
        mask=attention_mask,
        scaling=scaling,
        positions=position_ids,
        softcap=softcap,
        sinks=s_aux,
        config=getattr(module, "config", None),
    )
    attended = dense_attention(call) if archived is None else archived.attend(call)
    return attended.transpose(1, 2).contiguous(), None


def dense_attention(call: AttentionCall) -> torch.Tensor:
    """Attend to every key: (batch, n_query_heads, n_rows, value_dim) in the query's dtype.

    Handles what SDPA lacks (softcap as in Gemma 2, sink logits as in GPT-OSS); query heads of a group are rows of
    their KV head, so keys are never repeated.
    """
    batch, n_query_heads, n_rows, _ = call.query.shape
    n_kv_heads, n_local = call.key.shape[1], call.key.shape[2]
    group = n_query_heads // n_kv_heads
    block = max(1, _SCORE_FLOATS // max(1, batch * n_query_heads * n_local))
    keys, values = call.key.float().transpose(2, 3), call.value.float()
    lowest = torch.finfo(torch.float32).min  # not -inf: padding that sees nothing must not become NaN
    out = call.query.new_empty(batch, n_query_heads, n_rows, call.value.shape[-1])
    for start in range(0, n_rows, block):
        rows = slice(start, min(start + block, n_rows))
        query = call.query[:, :, rows].float().reshape(batch, n_kv_heads, -1, call.query.shape[-1])
        logits = cap(query @ keys * call.scaling, call.softcap).view(batch, n_kv_heads, group, -1, n_local)
        if call.mask is not None:
            logits = logits.masked_fill_(~call.mask[:, :, rows].unsqueeze(1), lowest)
        if call.sinks is not None:
            sinks = call.sinks.float().reshape(1, n_kv_heads, group, 1, 1).expand(batch, -1, -1, logits.shape[3], -1)
            logits = torch.cat([logits, sinks], dim=-1)
        weights = logits.softmax(-1)[..., :n_local].flatten(2, 3)
        attended = weights @ values
        out[:, :, rows] = attended.reshape(batch, n_query_heads, -1, attended.shape[-1]).to(out.dtype)
    return out


def cap(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """Squash logits as Gemma 2 does; unchanged without a softcap."""
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap
