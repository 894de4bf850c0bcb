"""GGUF files, whole and in parts: converted once, and never taken for whole when they are not."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from ragkv.errors import ConfigError, MissingExtraError, UnsupportedModelError
from ragkv.model.gguf import DEMO, MARKER, GgufParts, assemble, cache_dir, convert_gguf
from ragkv.model.load import load_config, load_model
from tests.tiny import TEXT, tiny_model, tiny_tokenizer

# GGUF's names for the weights of a Qwen2 model.
GGUF_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
GGUF_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def write_gguf(path: Path, model: PreTrainedModel, *, architecture: str = "qwen2") -> Path:
    """Write a Qwen2 model and the tiny tokenizer as a float32 GGUF file."""
    config, writer = model.config, gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    _write_tokenizer(writer)
    names = {f"{theirs}.weight": f"{ours}.weight" for theirs, ours in GGUF_TOP.items()}
    for layer in range(config.num_hidden_layers):
        for theirs, ours in GGUF_BLOCK.items():
            for kind in ("weight", "bias"):
                names[f"blk.{layer}.{theirs}.{kind}"] = f"model.layers.{layer}.{ours}.{kind}"
    weights = model.state_dict()
    for theirs, ours in names.items():
        if ours in weights:
            writer.add_tensor(theirs, weights[ours].numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_tokenizer(writer: gguf.GGUFWriter) -> None:
    tokenizer = tiny_tokenizer()
    bpe = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    special = set(tokenizer.all_special_tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in bpe["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)


def install_parts(folder: Path, data: bytes, cuts: tuple[int, ...]) -> tuple[tuple[str, str], ...]:
    """Lay out `data`, cut at `cuts`, as installed distributions under `folder`."""
    parts, bounds = [], (0, *cuts, len(data))
    for index, (start, stop) in enumerate(itertools.pairwise(bounds), start=1):
        distribution, file = f"ragkv-fake-part{index}", f"part{index:02d}.bin"
        package = distribution.replace("-", "_")
        (folder / package / "data").mkdir(parents=True)
        (folder / package / "data" / file).write_bytes(data[start:stop])
        info = folder / f"{package}-0.9.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 0.9.0\n")
        (info / "RECORD").write_text(f"{package}/data/{file},,\n")
        parts.append((distribution, file))
    return tuple(parts)


def describe(parts: tuple[tuple[str, str], ...], data: bytes) -> GgufParts:
    return GgufParts(parts=parts, n_bytes=len(data), sha256=hashlib.sha256(data).hexdigest(), extra="demo")


def one_line_of(raised: pytest.ExceptionInfo[BaseException]) -> str:
    message = str(raised.value)
    assert "\n" not in message
    return message


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny_model("qwen2"))


# Whole files


def test_a_gguf_file_is_converted_once_and_keeps_its_weights(gguf_file: Path, cache_folder: Path) -> None:
    messages: list[str] = []
    loaded = load_model(str(gguf_file), device="cpu", progress=messages.append)
    assert any("converting tiny.gguf once" in message for message in messages)
    original = tiny_model("qwen2").state_dict()
    assert loaded.model.dtype == torch.bfloat16
    for name, weight in loaded.model.state_dict().items():
        assert torch.equal(weight, original[name].to(torch.bfloat16)), name
    line = TEXT.splitlines()[0]
    assert loaded.tokenizer(line).input_ids == tiny_tokenizer()(line).input_ids
    assert loaded.tokenizer.eos_token_id == tiny_tokenizer().eos_token_id

    converted = cache_folder / "models" / hashlib.sha256(gguf_file.read_bytes()).hexdigest()
    before = (converted / "model.safetensors").stat().st_mtime_ns
    messages.clear()
    load_model(str(gguf_file), device="cpu", progress=messages.append)
    assert not any("converting" in message for message in messages)
    assert (converted / "model.safetensors").stat().st_mtime_ns == before


def test_the_config_of_a_gguf_file_is_the_same_before_and_after_conversion(gguf_file: Path, cache_folder: Path) -> None:
    def facts() -> dict[str, object]:
        own = {"_name_or_path", "architectures"}
        return {key: value for key, value in load_config(str(gguf_file)).to_dict().items() if key not in own}

    before = facts()
    assert not (cache_folder / "models").exists()
    convert_gguf(gguf_file)
    assert facts() == before


def test_what_a_killed_conversion_left_is_removed_and_not_taken_for_whole(gguf_file: Path, cache_folder: Path) -> None:
    sha256 = hashlib.sha256(gguf_file.read_bytes()).hexdigest()
    leftover = cache_folder / "models" / f"{sha256}.tmp-killed" / "model"
    leftover.mkdir(parents=True)
    (leftover / "config.json").write_text("{}")
    converted = convert_gguf(gguf_file)
    assert load_model(str(converted), device="cpu").model.config.model_type == "qwen2"
    assert [path.name for path in converted.parent.iterdir() if path.is_dir()] == [sha256]


def lose_marker(converted: Path) -> None:
    (converted / MARKER).unlink()


def age_marker(converted: Path) -> None:
    marker = json.loads((converted / MARKER).read_text())
    (converted / MARKER).write_text(json.dumps({**marker, "converter": 0}))


def mistake_marker(converted: Path) -> None:
    marker = json.loads((converted / MARKER).read_text())
    (converted / MARKER).write_text(json.dumps({**marker, "source_sha256": "0" * 64}))


def garble_marker(converted: Path) -> None:
    (converted / MARKER).write_text("[1]")


def cut_weights(converted: Path) -> None:
    data = (converted / "model.safetensors").read_bytes()
    (converted / "model.safetensors").write_bytes(data[:-1])


def lose_tokenizer(converted: Path) -> None:
    (converted / "tokenizer.json").unlink()


@pytest.mark.parametrize(
    "damage", [lose_marker, age_marker, mistake_marker, garble_marker, cut_weights, lose_tokenizer]
)
def test_a_folder_that_is_not_whole_or_not_current_is_converted_again(
    damage: Callable[[Path], None], gguf_file: Path, cache_folder: Path
) -> None:
    converted = convert_gguf(gguf_file)
    damage(converted)
    messages: list[str] = []
    assert convert_gguf(gguf_file, progress=messages.append) == converted
    assert any("converting" in message for message in messages)
    assert load_model(str(converted), device="cpu").model.config.num_hidden_layers == 3


@pytest.mark.parametrize("kept", [0.0, 0.001, 0.05, 0.3, 0.6, 0.99])
@pytest.mark.parametrize("load", [load_config, load_model])
def test_a_truncated_gguf_file_is_refused_and_leaves_nothing(
    load: Callable[[str], object], kept: float, gguf_file: Path, tmp_path: Path, cache_folder: Path
) -> None:
    data = gguf_file.read_bytes()
    short = tmp_path / "short.gguf"
    short.write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(ConfigError, match=r"short\.gguf.*cannot be loaded") as raised:
        load(str(short))
    one_line_of(raised)
    assert not [path for path in cache_folder.rglob("*") if path.is_dir() and path.name != "models"]


def test_a_gguf_file_of_an_unsupported_architecture_is_refused_unconverted(tmp_path: Path, cache_folder: Path) -> None:
    path = write_gguf(tmp_path / "other.gguf", tiny_model("qwen2"), architecture="starcoder2")
    with pytest.raises(UnsupportedModelError, match="'starcoder2' is not supported"):
        load_model(str(path))
    assert not list((cache_folder / "models").glob("*/*"))


def test_a_cache_folder_that_cannot_be_written_is_named(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "occupied").write_text("a file")
    monkeypatch.setenv("RAGKV_CACHE", str(tmp_path / "occupied"))
    with pytest.raises(ConfigError, match=r"cache folder .*occupied.* set RAGKV_CACHE") as raised:
        load_model(str(gguf_file))
    one_line_of(raised)


# Files installed in parts


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that distributions can be installed into."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    return folder


def test_parts_join_in_order(site: Path, tmp_path: Path) -> None:
    data = bytes(range(256)) * 20_000
    parts = install_parts(site, data, cuts=(1, 3_000_000, 3_000_000))
    assert assemble(describe(parts, data), tmp_path / "whole").read_bytes() == data


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data[:-1] + b"!", lambda data: data + b"!"])
def test_parts_of_other_bytes_are_refused_and_removed(
    change: Callable[[bytes], bytes], site: Path, tmp_path: Path
) -> None:
    data = b"the bytes that were described"
    parts = install_parts(site, change(data), cuts=(7,))
    with pytest.raises(ConfigError, match=r"reinstall them: pip install --force-reinstall 'ragkv\[demo\]'") as raised:
        assemble(describe(parts, data), tmp_path / "whole")
    assert describe(parts, data).sha256 in one_line_of(raised)
    assert not (tmp_path / "whole").exists()


def test_a_part_that_is_not_installed_names_the_extra(tmp_path: Path, cache_folder: Path) -> None:
    missing = GgufParts(parts=(("ragkv-fake-absent", "part01.bin"),), n_bytes=1, sha256="0" * 64, extra="demo")
    with pytest.raises(MissingExtraError, match=r"pip install 'ragkv\[demo\]'") as raised:
        convert_gguf(missing)
    one_line_of(raised)


def test_a_part_whose_file_is_gone_names_the_extra(site: Path, tmp_path: Path) -> None:
    parts = install_parts(site, b"data", cuts=())
    (site / "ragkv_fake_part1" / "data" / "part01.bin").unlink()
    with pytest.raises(MissingExtraError, match=r"has no part01.bin.*'ragkv\[demo\]'"):
        assemble(describe(parts, b"data"), tmp_path / "whole")


def test_a_model_in_parts_is_joined_converted_and_cleared_away(gguf_file: Path, site: Path, cache_folder: Path) -> None:
    data = gguf_file.read_bytes()
    model = describe(install_parts(site, data, cuts=(1000, len(data) // 2)), data)
    converted = convert_gguf(model)
    assert converted == convert_gguf(gguf_file)
    assert not list(cache_folder.rglob("*.gguf"))
    assert load_model(str(converted), device="cpu").model.config.model_type == "qwen2"


def test_the_demo_model_is_six_parts_in_order() -> None:
    assert [file for _, file in DEMO.parts] == [f"part0{part}.bin" for part in range(1, 7)]
    assert len(DEMO.sha256) == 64


# The cache folder


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAGKV_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "own"
    monkeypatch.delenv("RAGKV_CACHE")
    assert cache_dir() == tmp_path / "xdg" / "ragkv"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "ragkv"
