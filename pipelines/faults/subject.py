"""What the faults are tried on: a tiny model, texts of one length, and archives of them."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, DynamicCache, Gemma3TextConfig, PreTrainedTokenizerFast

from ragkv import LoadedModel, PromptLayout, Recipe, attach
from ragkv.archive.publish import LOCK_FILE
from ragkv.build.builder import BuildRequest, write_archive

LAYOUT = PromptLayout(prefix="Text: ", question="\nQuestion: {question}\nAnswer:")
QUESTION = "Who kept the book?"
LOSSLESS = Recipe(window_tokens=16, sink_tokens=4, key_codec="lossless", value_codec="lossless")
CODED = Recipe(window_tokens=16, sink_tokens=4)

_LINES = 24
_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "default", "rope_theta": 100_000.0},
}


@lru_cache(maxsize=1)
def model() -> LoadedModel:
    """A random model of a sliding and a global layer that reads bytes; the same in every process."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<|pad|>", "<|eos|>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    config = Gemma3TextConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        max_position_embeddings=2048,
        initializer_range=0.2,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters=_ROPE,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|eos|>", pad_token="<|pad|>", padding_side="left"
    )
    return LoadedModel(model=attach(network), tokenizer=fast, name="faults")


def text(boat: str) -> str:
    """A text; those of boats of one length have one number of tokens."""
    return "".join(f"On day {day:02} the {boat} rose {day * 7 % 31:02} feet.\n" for day in range(_LINES))


def build(path: Path, boat: str, recipe: Recipe) -> None:
    """The archive of a text at `path`."""
    request = BuildRequest.of(model(), text(boat), recipe=recipe, layout=LAYOUT, document_name=f"{boat}.txt")
    write_archive(request, _cache(boat), path)


@lru_cache(maxsize=16)
def _cache(boat: str) -> DynamicCache:
    return BuildRequest.of(model(), text(boat), layout=LAYOUT).prefill()


def tree(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below `folder`, but for the locks that stay where archives are put in place."""
    files = (found for found in sorted(folder.rglob("*")) if found.is_file() and found.name != LOCK_FILE)
    return {found.relative_to(folder).as_posix(): hashlib.sha256(found.read_bytes()).hexdigest() for found in files}


def leftovers(folder: Path) -> list[str]:
    """What builds leave that are not over: temporary folders and files, archives put aside, locks of one build."""
    names = (found.name for found in folder.rglob(".*") if found.name != LOCK_FILE)
    return sorted(name for name in names if name.endswith((".tmp", ".old", ".lock")))
