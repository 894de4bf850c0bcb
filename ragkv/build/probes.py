"""What queries look like for a document: snippets of it are asked as questions, and their queries measured.

Replacing a key k by its centroid m changes a logit by q.(k - m). How much that matters depends on the queries that
come, so clusters are formed, ranked and corrected with the second moment E[q q^T] of queries that stand where a
question will stand. Nothing is drawn at random and no question of a user is seen: the probes come from the document
itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from ragkv.errors import ConfigError
from ragkv.model.attention import AttentionCall, TiedCache, dense_attention
from ragkv.model.prompt import PromptLayout, question_ids
from ragkv.model.shape import model_shape

N_PROBES = 8
SNIPPET_TOKENS = 12


def probe_ids(tokenizer: PreTrainedTokenizerBase, layout: PromptLayout, document_ids: Sequence[int]) -> list[int]:
    """Token ids of the probes, one after another.

    Each is a snippet of the document in the question slot and, as its answer, the snippet that follows; they are taken
    at even distances. A document too short for them has no probes.
    """
    span = 2 * SNIPPET_TOKENS
    if len(document_ids) < span * N_PROBES:
        return []
    ids: list[int] = []
    for probe in range(N_PROBES):
        start = (len(document_ids) - span) * (2 * probe + 1) // (2 * N_PROBES)
        middle = start + SNIPPET_TOKENS
        asked = str(tokenizer.decode(list(document_ids[start:middle])))
        if asked.strip():
            ids += question_ids(tokenizer, layout, asked.replace("\ufffd", ""))
            ids += document_ids[middle : middle + SNIPPET_TOKENS]
    return ids


@torch.no_grad()
def query_moments(model: PreTrainedModel, cache: DynamicCache, ids: Sequence[int]) -> dict[int, torch.Tensor]:
    """Second moments of the scaled queries of `ids`, which follow the tokens in `cache` (batch 1, not changed).

    Returns (n_kv_heads, head_dim, head_dim) float32 for each global layer, over all query heads of a group; empty
    when there are no ids, or when they would reach beyond the context or a length-dependent RoPE.
    """
    shape, start = model_shape(model.config), cache.get_seq_length()
    end = start + len(ids)
    limits = (shape.max_positions, shape.static_positions)
    if not ids or any(limit is not None and end > limit for limit in limits):
        return {}
    meters = {layer.index: _QueryMeter() for layer in shape.global_layers}
    model.get_decoder()(
        input_ids=torch.tensor([list(ids)], device=model.device),
        position_ids=torch.arange(start, end, device=model.device).unsqueeze(0),
        cache=TiedCache(cache, meters),
        use_cache=True,
    )
    return {index: meter.moment() for index, meter in meters.items()}


class _QueryMeter:
    """Stands in for an archived layer: attends densely and keeps the second moment of the queries it sees."""

    def __init__(self) -> None:
        self._moment: torch.Tensor | None = None

    def attend(self, call: AttentionCall) -> torch.Tensor:
        n_kv_heads, head_dim = call.key.shape[1], call.query.shape[-1]
        rows = call.query.float().reshape(n_kv_heads, -1, head_dim) * call.scaling  # batch 1: query heads by group
        self._moment = rows.transpose(1, 2) @ rows / rows.shape[1]
        if call.softcap is not None or call.sinks is not None:
            return dense_attention(call)
        return F.scaled_dot_product_attention(
            call.query, call.key, call.value, attn_mask=call.mask, scale=call.scaling, enable_gqa=True
        )

    def moment(self) -> torch.Tensor:
        if self._moment is None:
            raise ConfigError("the model's attention is not ragkv's; load it with load_model or call attach(model)")
        return self._moment
