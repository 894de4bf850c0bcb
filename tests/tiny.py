"""Tiny random models and tokenizers, built in-process: real classes, no downloads.

Weights are drawn with a large standard deviation so that attention is peaked and a wrong key, value or position
changes the output visibly.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GlmConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

VOCAB_SIZE = 512
WINDOW = 24
BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
SPECIAL_TOKENS = (BOS, EOS, PAD)
BOS_ID, EOS_ID, PAD_ID = range(3)

TEXT = """\
The ferry left the harbour at seven in the morning and reached the island before noon. The keeper of the
lighthouse, Agnes Moore, wrote the time of every ship in a green book; the book is kept in the town museum.
In 1874 the harbour was made deeper, and two cranes were bought from a yard in the north. A question about
the text should be answered from the text alone: who kept the book, where is it now, and how many cranes
were bought? The answer is short. Numbers such as 12, 305 and 9,876 appear, and so do names - Weber, Ito,
Okafor, Lindqvist - and words in other scripts: caf\u00e9, na\u00efve, \u043c\u043e\u0440\u0435, \u6d77.
"""


@lru_cache(maxsize=1)
def _trained_bpe() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT.splitlines(), trainer)
    return tokenizer.to_str()


def tiny_tokenizer(*, adds_bos: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most `VOCAB_SIZE` tokens; with `adds_bos` it puts BOS before every text."""
    tokenizer = Tokenizer.from_str(_trained_bpe())
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, BOS_ID)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD, padding_side="left"
    )


def _common(n_layers: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": n_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "initializer_range": 0.2,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "tie_word_embeddings": False,
    }


def _hybrid(n_layers: int) -> list[str]:
    """Sliding and global layers in turn, a sliding one first."""
    return ["sliding_attention" if index % 2 == 0 else "full_attention" for index in range(n_layers)]


def _llama() -> PreTrainedConfig:
    return LlamaConfig(**_common(3), head_dim=16)


def _qwen2() -> PreTrainedConfig:
    return Qwen2Config(**_common(3))


def _qwen3() -> PreTrainedConfig:
    return Qwen3Config(**_common(3), head_dim=32)


def _mistral() -> PreTrainedConfig:
    return MistralConfig(**_common(3), head_dim=16, sliding_window=None)


def _mistral_window() -> PreTrainedConfig:
    return MistralConfig(**_common(3), head_dim=16, sliding_window=WINDOW)


def _gemma2() -> PreTrainedConfig:
    return Gemma2Config(
        **_common(4),
        head_dim=16,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=8.0,
        final_logit_softcapping=30.0,
        sliding_window=WINDOW,
        layer_types=_hybrid(4),
    )


def _gemma3() -> PreTrainedConfig:
    return Gemma3TextConfig(
        **_common(4),
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=WINDOW,
        layer_types=_hybrid(4),
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100_000.0},
        },
    )


def _phi3() -> PreTrainedConfig:
    return Phi3Config(**_common(3), sliding_window=None)


def _gpt_oss() -> PreTrainedConfig:
    return GptOssConfig(
        **_common(4),
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        layer_types=_hybrid(4),
    )


def _glm() -> PreTrainedConfig:
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
    return GlmConfig(**_common(3), head_dim=16, attention_bias=True, rope_parameters=rope)


_CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mistral": _mistral,
    "mistral_window": _mistral_window,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "gpt_oss": _gpt_oss,
    "glm": _glm,
}

TINY_MODELS = tuple(_CONFIGS)
"""Every name that `tiny_model` takes: one per architecture, and Mistral with and without its window."""


def tiny_config(name: str) -> PreTrainedConfig:
    """The configuration that `tiny_model` builds from."""
    return _CONFIGS[name]()


def tiny_model(name: str, *, seed: int = 0) -> PreTrainedModel:
    """A random float32 model in eval mode; the same `seed` gives the same weights, and no global seed is touched."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(name), dtype=torch.float32)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                _sharpen(parameter_name, parameter)
    return model.eval()


def _sharpen(name: str, parameter: torch.Tensor) -> None:
    """Peak the attention, and give weight to what a fresh model leaves at zero or one: biases, sinks, norms."""
    if name.endswith(("q_proj.weight", "k_proj.weight")):
        parameter.mul_(1.4)
    elif name.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias")):
        parameter.normal_(0.0, 0.5)
    elif name.endswith("sinks"):
        parameter.normal_(1.0, 1.5)
    elif name.endswith(("q_norm.weight", "k_norm.weight")):
        parameter.add_(torch.empty_like(parameter).normal_(1.0, 0.3))
