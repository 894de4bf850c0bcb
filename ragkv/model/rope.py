"""The rotary position encoding of a model as a matrix: what queries are multiplied with to see a document moved.

The model's own functions are asked, so that partial, interleaved and scaled encodings come out as the model has them.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import PreTrainedModel

from ragkv.errors import UnsupportedModelError


@torch.no_grad()
def turn_back(model: PreTrainedModel, distance: int, *, layer: int, key_dim: int) -> torch.Tensor:
    """Matrix M (key_dim, key_dim) float32: ``query @ M`` is a query turned back by `distance` positions.

    Products of turned queries with keys at position p are those of the queries with the same keys at p + `distance`;
    ``keys @ M.T`` moves the keys instead.

    Raises
    ------
    UnsupportedModelError
        If the model's position encoding is not one that ragkv knows how to ask.
    """
    decoder: Any = model.get_decoder()
    apply = getattr(sys.modules[type(decoder).__module__], "apply_rotary_pos_emb", None)
    rotary = getattr(decoder, "rotary_emb", None)
    if apply is None or rotary is None:
        raise UnsupportedModelError(
            f"model type {model.config.model_type!r}: its position encoding cannot be asked for, so documents "
            "cannot be moved; ask one document at a time"
        )
    config = model.config.get_text_config(decoder=True)
    own = {name for name, entry in (config.rope_parameters or {}).items() if isinstance(entry, dict)}
    kinds = [config.layer_types[layer]] if own else []  # layer types with an encoding of their own, as in Gemma 3
    unit = torch.eye(key_dim, device=model.device)  # rows are queries, all at one position
    at = torch.tensor([[0, distance]], device=model.device)
    cosine, sine = rotary(unit, at, *kinds)  # (1, 2, n) float32, both scaled alike by some encodings
    scale = cosine[:, :1]
    turned, _ = apply(unit[None, None], unit[None, None], cosine[:, 1:] / scale, -sine[:, 1:] / scale)
    return torch.as_tensor(turned)[0, 0]
