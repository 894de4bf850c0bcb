"""Reading keys and values out of a transformers cache."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer


def layer_tensors(cache: Cache) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values (batch, n_kv_heads, n_tokens, head_dim) of every layer that holds some, in layer order."""
    for layer in cache.layers:
        if isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None:
            yield layer.keys, layer.values


def kv_nbytes(cache: Cache) -> int:
    """Bytes of all keys and values that a cache holds."""
    return sum(keys.nbytes + values.nbytes for keys, values in layer_tensors(cache))


def fork_cache(cache: DynamicCache) -> DynamicCache:
    """A cache that starts with what `cache` holds and grows on its own; nothing is copied.

    Growing rebinds a layer's tensors and never writes into them, so `cache` stays as it is.
    """
    fork = copy.copy(cache)
    fork.layers = [copy.copy(layer) for layer in cache.layers]
    return fork
