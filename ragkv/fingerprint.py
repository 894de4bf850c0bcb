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

from ragkv.architecture import model_shape
from ragkv.errors import ModelMismatchError

_VOLATILE_CONFIG = (
    "_name_or_path",
    "_attn_implementation",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "use_cache",
)
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


def require_match(archived: Fingerprint, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a model or tokenizer other than the archived one, naming both sides.

    Raises
    ------
    ModelMismatchError
        If any field but the dtype differs.
    """
    present = fingerprint(model, tokenizer, getattr(torch, archived.dtype))
    for name, ours in archived.to_dict().items():
        theirs = getattr(present, name)
        if ours != theirs:
            raise ModelMismatchError(
                f"the archive was built with another model: its {name} is {_short(ours)} and the loaded model's is "
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
    """SHA-256 of a fast tokenizer's vocabulary and rules; padding and truncation settings do not count."""
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    rules.pop("padding", None)
    rules.pop("truncation", None)
    return _json_sha256(rules)


def _config_sha256(model: PreTrainedModel) -> str:
    config = model.config.get_text_config(decoder=True).to_dict()
    return _json_sha256({key: value for key, value in config.items() if key not in _VOLATILE_CONFIG})


def _json_sha256(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _combined(digests: Iterable[bytes]) -> str:
    hasher = hashlib.sha256()
    for digest in digests:
        hasher.update(digest)
    return hasher.hexdigest()


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return text[:12] + "..." if len(text) == 64 else text
