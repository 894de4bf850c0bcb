"""What makes two models the same to an archive: weights, configuration, tokenizer, RoPE, dtype.

Identity is what decides the keys and values and nothing else: not the names of weights, not fields of a configuration
that only say what goes without saying. ``indexes/FORMAT.md`` has the rules.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ragkv.errors import ModelMismatchError
from ragkv.model.prompt import data_ids
from ragkv.model.shape import model_shape
from ragkv.model.stamp import WeightStamp, weight_stamp
from ragkv.model.weights import weights_sha256

_CONFIG_NUMBERS = (
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "num_experts_per_tok",
    "query_pre_attn_scalar",
    "rms_norm_eps",
    "swiglu_limit",
)
"""What neither the weights nor the shape of the cache say and the keys and values depend on. A fixed list: the
configuration of another release of transformers may carry further fields, and that must not orphan an archive."""

_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "high_freq_factor", "low_freq_factor", "original_max_position_embeddings"),
    "longrope": ("attention_factor", "factor", "long_factor", "original_max_position_embeddings", "short_factor"),
    "yarn": (
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "factor",
        "mscale",
        "mscale_all_dim",
        "original_max_position_embeddings",
        "truncate",
    ),
}
"""What each type of RoPE reads of its parameters, beside `_ROPE_COMMON`."""

_ROPE_COMMON = ("partial_rotary_factor", "rope_theta", "rope_type")
_ROPE_DEFAULTS = {"partial_rotary_factor": 1.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
_FREQUENCY_ERROR = 2.0**-7  # relative; a model that was cast to bfloat16 as a whole has frequencies of 8 bits

_PROBES = ("The", " The 3 quick-brown foxes'll jump_over\t\nthe caf\u00e9, \u6d77 \U0001f98a; x=f(12.5)  {}\r\n")


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


class Identified(Protocol):
    """What can be asked for its fingerprint: a `LoadedModel`."""

    def fingerprint(self, dtype: torch.dtype | None = None) -> Fingerprint: ...


def fingerprint(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype) -> Fingerprint:
    """Fingerprint a model as if its weights were held in `dtype`.

    Casting first makes the same checkpoint recognisable when it was loaded in another dtype. The weights are hashed
    once for each model and dtype, and again after `weight_stamp` saw them changed, so that asking again takes
    milliseconds. Any number of threads may ask.

    Raises
    ------
    UnsupportedModelError
        If weights are not in memory, or of a kind that cannot be hashed.
    """
    known = _of(_MODELS, model, _KnownWeights)
    with known.lock:
        stamp = weight_stamp(model)
        if stamp != known.stamp:
            known.stamp, known.sha256 = stamp, {}
            known.changed_frequencies = _changed_frequencies(model)
        if dtype not in known.sha256:
            known.sha256[dtype] = weights_sha256(model, dtype)
        weights, changed_frequencies = known.sha256[dtype], known.changed_frequencies
    config = model.config.get_text_config(decoder=True)
    return Fingerprint(
        model_type=config.model_type,
        dtype=str(dtype).removeprefix("torch."),
        weights_sha256=weights,
        config_sha256=config_sha256(config),
        tokenizer_sha256=_known_tokenizer_sha256(tokenizer),
        rope_parameters=rope_identity(model_shape(config).rope_parameters) | changed_frequencies,
    )


def require_match(archived: Fingerprint, model: Identified, *, what: str = "archive") -> None:
    """Refuse a model or tokenizer other than the archived one, naming both sides.

    This looks at the model as it is now and takes milliseconds where it did not change, so that every opening and
    every request can ask.

    Parameters
    ----------
    what
        What was built with the archived model, for the message.

    Raises
    ------
    ModelMismatchError
        If any field but the dtype differs.
    """
    present = model.fingerprint(getattr(torch, archived.dtype))
    for name, ours in archived.to_dict().items():
        theirs = getattr(present, name)
        if ours != theirs:
            raise ModelMismatchError(
                f"the {what} was built with another model: its {name} is {_short(ours)} and the loaded model's is "
                f"{_short(theirs)}; load the model it was built with, or build it again"
            )


def config_sha256(config: PreTrainedConfig) -> str:
    """SHA-256 of what weights and RoPE do not say of a text model, by what it means rather than as it is written.

    Heads, their size and the windows of the layers are those of `model_shape`, so that it makes no difference whether a
    configuration states them or leaves them to be worked out.
    """
    shape = model_shape(config)
    values: dict[str, Any] = {name: getattr(config, name, None) for name in _CONFIG_NUMBERS}
    values |= {
        "activation": getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None),
        "bidirectional": True if getattr(config, "use_bidirectional_attention", None) else None,
        "head_dim": shape.layers[0].head_dim,
        "model_type": shape.model_type,
        "n_kv_heads": shape.layers[0].n_kv_heads,
        "n_query_heads": shape.n_query_heads,
        "windows": [layer.window for layer in shape.layers],
    }
    if shape.static_positions is not None:  # a length-dependent RoPE also scales by the context length
        values["max_positions"] = shape.max_positions
    return json_sha256({name: _plain(value) for name, value in values.items() if value is not None})


def rope_identity(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE parameters without what goes without saying: unused keys, nulls, defaults, whole numbers or not."""
    if "rope_type" not in parameters:  # one entry for each layer type
        return {name: rope_identity(entry) for name, entry in parameters.items() if isinstance(entry, Mapping)}
    kept = (*_ROPE_COMMON, *_ROPE_KEYS.get(parameters["rope_type"], tuple(parameters)))
    values = {name: _plain(parameters[name]) for name in kept if parameters.get(name) is not None}
    return {name: value for name, value in values.items() if _ROPE_DEFAULTS.get(name) != value}


def tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of a tokenizer's vocabulary and of how it cuts two probe texts; padding and truncation do not count."""
    return json_sha256([sorted(tokenizer.get_vocab().items()), *(data_ids(tokenizer, probe) for probe in _PROBES)])


def json_sha256(value: object) -> str:
    """SHA-256 of canonical JSON: sorted keys, one space after comma and colon, nothing but ASCII."""
    return sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _changed_frequencies(model: PreTrainedModel) -> dict[str, str]:
    """The rotary frequencies that are not those of the configuration, hashed; empty for any model as it was loaded.

    No file of weights holds them, and a length-dependent RoPE changes them itself.
    """
    rotary = getattr(model.get_decoder(), "rotary_emb", None)
    config = model.config.get_text_config(decoder=True)
    if rotary is None or model_shape(config).static_positions is not None:
        return {}
    fresh = dict(type(rotary)(config=config).named_buffers())
    changed: dict[str, str] = {}
    for name, buffer in rotary.named_buffers():
        if name not in fresh or buffer.device.type == "meta":
            continue
        found, expected = buffer.detach().cpu().float(), fresh[name].detach().to(buffer.dtype).cpu().float()
        if found.shape != expected.shape or not torch.allclose(found, expected, rtol=_FREQUENCY_ERROR, atol=0):
            changed[f"changed_{name}"] = sha256(found.numpy().tobytes()).hexdigest()
    return changed


@dataclass
class _KnownWeights:
    """What was worked out of a model's weights, and how they looked then."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    stamp: WeightStamp | None = None
    sha256: dict[torch.dtype, str] = field(default_factory=dict)
    changed_frequencies: dict[str, str] = field(default_factory=dict)


@dataclass
class _KnownTokenizer:
    """The hash of a tokenizer, and what it was quickly told by: sorting a large vocabulary takes a while."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    stamp: tuple[Any, ...] | None = None
    sha256: str = ""


# Kept beside the objects themselves: two `LoadedModel`s of one model share what is known, and it goes with the model.
_MODELS: WeakKeyDictionary[PreTrainedModel, _KnownWeights] = WeakKeyDictionary()
_TOKENIZERS: WeakKeyDictionary[PreTrainedTokenizerBase, _KnownTokenizer] = WeakKeyDictionary()
_ONE_AT_A_TIME = threading.Lock()
_Thing = TypeVar("_Thing")
_Known = TypeVar("_Known")


def _of(table: WeakKeyDictionary[_Thing, _Known], key: _Thing, make: Callable[[], _Known]) -> _Known:
    with _ONE_AT_A_TIME:
        if key not in table:
            table[key] = make()
        return table[key]


def _known_tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    known = _of(_TOKENIZERS, tokenizer, _KnownTokenizer)
    with known.lock:
        backend = id(getattr(tokenizer, "backend_tokenizer", None))
        stamp = (backend, len(tokenizer), *(data_ids(tokenizer, probe) for probe in _PROBES))
        if stamp != known.stamp:
            known.sha256, known.stamp = tokenizer_sha256(tokenizer), stamp
        return known.sha256


def _plain(value: Any) -> Any:
    """A value as JSON holds it, numbers all of one kind: 10000 and 10000.0 are the same."""
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return text[:12] + "..." if len(text) == 64 else text
