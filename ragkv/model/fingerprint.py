"""What makes two models the same to an archive: weights, configuration, tokenizer, RoPE, dtype."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ragkv.errors import ModelMismatchError
from ragkv.model.prompt import data_ids
from ragkv.model.shape import model_shape

_CONFIG_FIELDS = (
    "attention_bias",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "head_dim",
    "hidden_act",
    "hidden_activation",
    "hidden_size",
    "intermediate_size",
    "layer_types",
    "model_type",
    "num_attention_heads",
    "num_experts_per_tok",
    "num_hidden_layers",
    "num_key_value_heads",
    "num_local_experts",
    "partial_rotary_factor",
    "query_pre_attn_scalar",
    "rms_norm_eps",
    "sliding_window",
    "swiglu_limit",
    "use_bidirectional_attention",
)
"""What the weights do not say and the keys and values depend on. A fixed list: the configuration of another release of
transformers may carry further fields, and that must not orphan an archive. RoPE is compared by itself."""

_PROBES = ("The", " The 3 quick-brown foxes'll jump_over\t\nthe caf\u00e9, \u6d77 \U0001f98a; x=f(12.5)  {}\r\n")
_HASH_THREADS = 4


@dataclass(frozen=True)
class Fingerprint:
    """Identity of the model that computed an archive; every field but `dtype` must match at query time."""

    model_type: str
    dtype: str
    weights_sha256: str
    config_sha256: str
    tokenizer_sha256: str
    rope_parameters: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def fingerprint(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype) -> Fingerprint:
    """Fingerprint a model as if its weights were held in `dtype`.

    Casting first makes the same checkpoint recognisable when it was loaded in another dtype.
    """
    return Fingerprint(
        model_type=model.config.model_type,
        dtype=str(dtype).removeprefix("torch."),
        weights_sha256=weights_sha256(model, dtype),
        config_sha256=_config_sha256(model),
        tokenizer_sha256=tokenizer_sha256(tokenizer),
        rope_parameters=json.loads(json.dumps(model_shape(model.config).rope_parameters)),
    )


def require_match(
    archived: Fingerprint,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    known: Fingerprint | None = None,
    what: str = "archive",
) -> None:
    """Refuse a model or tokenizer other than the archived one, naming both sides.

    Parameters
    ----------
    known
        A fingerprint of this model that was worked out before. Where it is of the archive's dtype the weights need
        not be hashed again, which takes seconds for a model of billions of weights.
    what
        What was built with the archived model, for the message.

    Raises
    ------
    ModelMismatchError
        If any field but the dtype differs.
    """
    present = known
    if present is None or present.dtype != archived.dtype:
        present = fingerprint(model, tokenizer, getattr(torch, archived.dtype))
    for name, ours in archived.to_dict().items():
        theirs = getattr(present, name)
        if ours != theirs:
            raise ModelMismatchError(
                f"the {what} was built with another model: its {name} is {_short(ours)} and the loaded model's is "
                f"{_short(theirs)}; load the model it was built with, or build it again"
            )


def weights_sha256(model: PreTrainedModel, dtype: torch.dtype) -> str:
    """SHA-256 over name, shape and values of all weights, floating ones cast to `dtype`."""

    def digest(item: tuple[str, torch.Tensor]) -> bytes:
        name, tensor = item
        tensor = tensor.detach()
        tensor = (tensor.to(dtype) if tensor.is_floating_point() else tensor).cpu().contiguous()
        hasher = hashlib.sha256(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        hasher.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return hasher.digest()

    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        return _combined(pool.map(digest, sorted(model.state_dict().items())))


def tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of a tokenizer's vocabulary and of how it cuts two probe texts; padding and truncation do not count."""
    return json_sha256([sorted(tokenizer.get_vocab().items()), *(data_ids(tokenizer, probe) for probe in _PROBES)])


def _config_sha256(model: PreTrainedModel) -> str:
    config = model.config.get_text_config(decoder=True)
    fields = {name: value for name in _CONFIG_FIELDS if (value := getattr(config, name, None)) is not None}
    if model_shape(config).static_positions is not None:  # a length-dependent RoPE also scales by the context length
        fields["max_position_embeddings"] = config.max_position_embeddings
    return json_sha256(fields)


def json_sha256(value: object) -> str:
    """SHA-256 of canonical JSON: sorted keys, one space after comma and colon, nothing but ASCII."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _combined(digests: Iterable[bytes]) -> str:
    hasher = hashlib.sha256()
    for digest in digests:
        hasher.update(digest)
    return hasher.hexdigest()


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return text[:12] + "..." if len(text) == 64 else text
