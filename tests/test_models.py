"""Loading by name: what comes back, what is converted once, and what each bad name says."""

from __future__ import annotations

import io
import json
import logging
import shutil
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

from ragkv.errors import ConfigError, UnsupportedModelError
from ragkv.model.load import load_config, load_model
from tests.tiny import TEXT, tiny_model, tiny_tokenizer


def save_folder(folder: Path, model: PreTrainedModel) -> Path:
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def one_line_of(raised: pytest.ExceptionInfo[BaseException]) -> str:
    message = str(raised.value)
    assert "\n" not in message
    return message


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved tiny Qwen2 model; tests copy it before they damage it."""
    return save_folder(tmp_path_factory.mktemp("models") / "qwen2", tiny_model("qwen2"))


@pytest.fixture
def broken(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "broken"))


# Folders


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
def test_a_saved_folder_answers_as_the_model_that_was_saved(name: str, tmp_path: Path) -> None:
    model = tiny_model(name)
    loaded = load_model(str(save_folder(tmp_path / name, model)), device="cpu")
    ids = tiny_tokenizer()(TEXT, return_tensors="pt").input_ids[:, :100]
    with torch.inference_mode():
        torch.testing.assert_close(loaded.model(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-4)
    assert loaded.tokenizer(TEXT).input_ids == tiny_tokenizer()(TEXT).input_ids
    assert loaded.name == str(tmp_path / name)
    assert not loaded.model.training


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (None, torch.float32),
        ("bf16", torch.bfloat16),
        ("float16", torch.float16),
        ("fp32", torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_the_dtype_is_the_checkpoints_own_unless_named(
    dtype: str | torch.dtype | None, expected: torch.dtype, folder: Path
) -> None:
    assert load_model(str(folder), dtype=dtype, device="cpu").model.dtype == expected


@pytest.mark.parametrize("dtype", ["int8", "", "BF16", torch.int32])
def test_an_unknown_dtype_is_refused(dtype: str | torch.dtype, folder: Path) -> None:
    with pytest.raises(ConfigError, match="is not known; give one of bf16") as raised:
        load_model(str(folder), dtype=dtype)
    one_line_of(raised)


@pytest.mark.parametrize("device", ["gpu", "cpu:x", "cuda:99", "meta"])
def test_an_unusable_device_is_refused(device: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=f"device '{device}' cannot be used here") as raised:
        load_model(str(folder), device=device)
    one_line_of(raised)


def test_loading_prints_nothing_and_puts_the_log_settings_back(folder: Path) -> None:
    before = logging.getLogger("transformers").level
    with redirect_stdout(io.StringIO()) as out:
        load_model(str(folder), device="cpu")
    assert out.getvalue() == ""
    assert logging.getLogger("transformers").level == before


def test_an_unsupported_architecture_is_refused_before_its_weights_are_read(broken: Path) -> None:
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "model_type": "olmo2"}))
    (broken / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(UnsupportedModelError, match="model type 'olmo2' is not supported"):
        load_model(str(broken))


# Bad names and damaged folders


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "neither a folder that exists nor a hub id"),
        ("no/such/folder", "neither a folder that exists nor a hub id"),
        ("./nowhere", "is a local folder, and there is no such folder here"),
        ("../no/where", "is a local folder, and there is no such folder here"),
        ("~/nowhere-at-all", "is a local folder, and there is no such folder here"),
        ("/nowhere", "is a local folder, and there is no such folder here"),
        ("two words", "neither a folder that exists nor a hub id"),
        ("nowhere.gguf", "there is no such file"),
        ("nobody/nothing", "cannot be loaded"),
        (__file__, "is a file but not a .gguf file"),
    ],
)
@pytest.mark.parametrize("load", [load_config, load_model])
def test_a_name_of_nothing_is_one_clear_line(load: Callable[[str], object], name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        load(name)
    line = one_line_of(raised)
    assert repr(name) in line
    assert "give demo, a hub id, a local folder or a .gguf file" in line


def damage_nothing_there(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


def damage_config(folder: Path) -> None:
    (folder / "config.json").write_text("{not json")


def damage_config_value(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": "wide"}))


def damage_type(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


def damage_remote_code(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.Config"}}')


def damage_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def damage_pickled_weights(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def damage_truncated_weights(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def damage_missing_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.self_attn.k_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def damage_misshapen_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.self_attn.k_proj.weight"] = torch.zeros(3, 3)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def damage_no_tokenizer(folder: Path) -> None:
    for file in folder.glob("token*"):
        file.unlink()


def damage_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{not json")


def damage_merges(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["merges"].append(["never", "seen"])
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_nothing_there, "cannot be loaded"),
        (damage_config, "not a valid JSON file"),
        (damage_config_value, "hidden_size.*expected int"),
        (damage_type, "cannot be loaded"),
        (damage_remote_code, "custom code"),
        (damage_no_weights, "model.safetensors"),
        (damage_pickled_weights, "model.safetensors"),
        (damage_truncated_weights, "cannot be loaded"),
        (damage_missing_weight, "1 weights do not fit its config.json.*k_proj"),
        (damage_misshapen_weight, "1 weights do not fit its config.json.*k_proj"),
        (damage_no_tokenizer, "has no tokenizer files"),
        (damage_tokenizer, "cannot be loaded"),
        (damage_merges, "never.*out of vocabulary"),
    ],
)
def test_a_damaged_folder_is_one_clear_line(damage: Callable[[Path], None], message: str, broken: Path) -> None:
    damage(broken)
    with pytest.raises(ConfigError, match=message) as raised:
        load_model(str(broken), device="cpu")
    assert repr(str(broken)) in one_line_of(raised)


# The tiny parts that other tests build on


def test_the_bos_tokenizer_puts_bos_before_a_text(
    tokenizer: PreTrainedTokenizerFast, bos_tokenizer: PreTrainedTokenizerFast
) -> None:
    assert bos_tokenizer(TEXT).input_ids == [tokenizer.bos_token_id, *tokenizer(TEXT).input_ids]
    assert tokenizer.decode(tokenizer(TEXT).input_ids) == TEXT


def test_load_config_reads_no_weights(tmp_path: Path) -> None:
    LlamaConfig(num_hidden_layers=7).save_pretrained(tmp_path)
    assert load_config(str(tmp_path)).num_hidden_layers == 7
