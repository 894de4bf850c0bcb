"""The identity of a model: what counts, and what does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ragkv import LoadedModel, attach
from ragkv.errors import ModelMismatchError, UnsupportedModelError
from ragkv.model.fingerprint import config_sha256, require_match, rope_identity
from ragkv.model.weights import weights_sha256
from tests.tiny import TINY_MODELS, tiny_config, tiny_model, tiny_tokenizer

F32 = torch.float32


def fresh(name: str = "llama") -> LoadedModel:
    return LoadedModel(model=attach(tiny_model(name)), tokenizer=tiny_tokenizer(), name=name)


def down(model: LoadedModel) -> nn.Linear:
    linear: nn.Linear = model.model.model.layers[1].mlp.down_proj
    return linear


# --- what counts, and what does not


class Wrapped(nn.Module):
    """One more prefix in front of every name."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._orig_mod = model


def test_names_of_weights_do_not_count() -> None:
    model = tiny_model("llama")
    before = weights_sha256(model, F32)
    assert weights_sha256(Wrapped(model), F32) == before
    for layer in model.model.layers:
        named = layer.mlp._modules
        layer.mlp._modules = {"zz" if name == "gate_proj" else name: child for name, child in named.items()}
    assert "model.layers.0.mlp.zz.weight" in model.state_dict()
    assert weights_sha256(model, F32) == before


def test_tied_weights_count_once() -> None:
    model = tiny_model("llama")
    model.lm_head.weight = model.model.embed_tokens.weight
    headless = tiny_model("llama")
    headless.lm_head = nn.Identity()
    assert weights_sha256(model, F32) == weights_sha256(headless, F32)
    assert weights_sha256(model, F32) != weights_sha256(tiny_model("llama"), F32)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_a_model_is_the_same_in_another_dtype_and_in_a_process_of_its_own(name: str) -> None:
    model, again = fresh(name), fresh(name)
    archived = model.fingerprint(torch.bfloat16)
    require_match(archived, again)
    require_match(archived, LoadedModel(again.model.to(torch.bfloat16), again.tokenizer, name))
    assert not any(key.startswith("changed_") for key in archived.rope_parameters)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            {"rope_type": "default", "rope_theta": 10_000},
            {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0, "factor": None},
        ),
        (
            {"rope_type": "default", "rope_theta": 1e4},
            {"rope_type": "default", "rope_theta": 1e4, "type": "default", "original_max_position_embeddings": 4096},
        ),
        (
            {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4, "original_max_position_embeddings": 128},
            {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "beta_fast": 32,
                "beta_slow": 1,
                "truncate": True,
                "attention_factor": None,
                "finetuned": True,
            },
        ),
        (
            {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
            {"full_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1}, "x": None},
        ),
    ],
)
def test_rope_keys_that_say_nothing_do_not_count(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert rope_identity(one) == rope_identity(other)


@pytest.mark.parametrize(
    "other",
    [
        {"rope_theta": 5e5},
        {"partial_rotary_factor": 0.5},
        {"factor": 8.0},
        {"truncate": False},
        {"beta_fast": 16.0},
        {"rope_type": "linear"},
    ],
)
def test_rope_keys_that_turn_otherwise_count(other: dict[str, Any]) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
    assert rope_identity(rope) != rope_identity(rope | other)


def test_fields_that_say_what_goes_without_saying_do_not_count() -> None:
    plain, spelt = tiny_config("qwen2"), tiny_config("qwen2")
    spelt.head_dim = 16
    spelt.use_bidirectional_attention = spelt.attention_bias = False
    spelt.new_in_the_next_release = 3
    assert config_sha256(plain) == config_sha256(spelt)
    spelt.head_dim = 32
    assert config_sha256(plain) != config_sha256(spelt)


# --- odd state dictionaries


class Extra(nn.Linear):
    """A layer with state that is not a tensor, as FP8 layers of Transformer Engine have."""

    def __init__(self, state: object) -> None:
        super().__init__(4, 4)
        self.state = state

    def get_extra_state(self) -> object:
        return self.state

    def set_extra_state(self, state: object) -> None:
        self.state = state


def with_extra(state: object) -> LoadedModel:
    model = fresh()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model.model.model.extra = Extra(state)
    return model


@pytest.mark.parametrize("state", [None, 1.5, "text", b"bytes", {"scale": torch.ones(2), "n": [1, 2]}])
def test_extra_state_of_plain_values_counts(state: object) -> None:
    archived = with_extra(state).fingerprint()
    assert with_extra(state).fingerprint() == archived
    with pytest.raises(ModelMismatchError, match="weights_sha256"):
        require_match(archived, with_extra("another"))


def test_extra_state_of_other_kinds_is_refused_in_one_sentence() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'model\.extra\._extra_state' holds a object") as raised:
        with_extra(object()).fingerprint()
    assert "\n" not in str(raised.value)


def test_weights_that_torch_ao_packs_count() -> None:
    def packed(seed: int) -> nn.Module:
        return torch.ao.quantization.quantize_dynamic(tiny_model("llama", seed=seed), {nn.Linear}, dtype=torch.qint8)

    assert weights_sha256(packed(0), F32) == weights_sha256(packed(0), F32)
    assert weights_sha256(packed(0), F32) != weights_sha256(packed(1), F32)
    model = LoadedModel(packed(0), tiny_tokenizer(), "packed")
    require_match(model.fingerprint(F32), model)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool])
def test_weights_of_eight_bits_count_as_they_are_stored(dtype: torch.dtype) -> None:
    def small(value: float) -> LoadedModel:
        model = fresh()
        weight = torch.full((6, 8), value).to(dtype)
        down(model).weight = nn.Parameter(weight, requires_grad=False)
        return model

    model = small(1.0)
    archived = model.fingerprint(torch.bfloat16)
    require_match(archived, model)
    require_match(archived, small(1.0))
    down(model).weight.data.zero_()
    with pytest.raises(ModelMismatchError, match="weights_sha256"):
        require_match(archived, model)


def test_weights_that_are_not_in_memory_are_refused_in_one_sentence() -> None:
    model = fresh()
    down(model).to("meta")
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.mlp\.down_proj\.weight' is not in memory") as raised:
        model.fingerprint(F32)
    assert "\n" not in str(raised.value)


def test_tensors_that_are_made_of_others_are_refused_in_one_sentence() -> None:
    model = fresh()
    sparse = torch.zeros(64, 96).to_sparse()
    down(model).weight = nn.Parameter(sparse, requires_grad=False)
    with pytest.raises(UnsupportedModelError, match="cannot be read") as raised:
        model.fingerprint(F32)
    assert "\n" not in str(raised.value)
