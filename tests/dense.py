"""The dense reference of the exactness tests: the model's own attention over the joined token ids."""

from __future__ import annotations

import copy

import torch
from transformers import DynamicCache, PreTrainedModel


def stock_copy(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights with transformers' eager attention, which knows nothing of ragkv."""
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("eager")
    return twin


@torch.no_grad()
def dense_logits(model: PreTrainedModel, ids: list[int], n_last: int) -> torch.Tensor:
    """Logits (n_last, vocab) of the last positions from one plain forward over all token ids."""
    return model(torch.tensor([ids]), use_cache=False).logits[0, -n_last:]


@torch.no_grad()
def dense_answer(model: PreTrainedModel, ids: list[int], n_new: int) -> list[int]:
    """Greedy answer tokens of the stock model over all token ids."""
    out = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
        cache=DynamicCache(config=model.config),
        max_new_tokens=n_new,
        min_new_tokens=n_new,
        do_sample=False,
    )
    return out[0, len(ids) :].tolist()
