"""Which model may open an archive, which architectures are archived at all, and what RoPE allows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, normalizers
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3nTextConfig,
    GPT2Config,
    PreTrainedConfig,
    Qwen3NextConfig,
)

from ragkv import Archive, ArchiveCache, LoadedModel, PromptLayout, attach, build_archive
from ragkv.answer.ask import ask
from ragkv.errors import ModelMismatchError, RagkvError, UnsupportedModelError
from ragkv.model.fingerprint import tokenizer_sha256
from ragkv.model.shape import model_shape
from tests.archives import DOCUMENT, EVERYTHING, SMALL, loaded
from tests.dense import dense_answer, dense_logits, stock_copy
from tests.tiny import tiny_config, tiny_model, tiny_tokenizer

PLAIN = PromptLayout.plain()
SHORT = DOCUMENT[:900]
QUESTION = "Who kept the book?"


def model_of(config: PreTrainedConfig, *, seed: int = 0) -> LoadedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    return LoadedModel(model=attach(model), tokenizer=tiny_tokenizer(), name="own")


def changed(name: str, **values: Any) -> PreTrainedConfig:
    config = tiny_config(name)
    for key, value in values.items():
        setattr(config, key, value)
    return type(config)(**config.to_dict())


def build(model: LoadedModel, folder: Path, document: str = SHORT) -> Path:
    return build_archive(model, document, folder, recipe=SMALL, layout=PLAIN).path


def refusal(raised: pytest.ExceptionInfo[RagkvError]) -> str:
    assert "\n" not in str(raised.value)
    return str(raised.value)


def n_prompt(document: str) -> int:
    tokenizer = tiny_tokenizer()
    return sum(len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (PLAIN.prefix, document))


def assert_equals_dense(archive: Archive) -> None:
    inputs = archive.questions([QUESTION])
    ids, model = inputs["input_ids"][0].tolist(), archive.model.model
    with torch.no_grad():
        logits = model(**inputs, cache=ArchiveCache(archive, budget=EVERYTHING)).logits[0]
    stock, prompt = stock_copy(model), archive.tokens.ids.tolist() + ids
    torch.testing.assert_close(logits, dense_logits(stock, prompt, len(ids)), atol=1e-4, rtol=0)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    out = model.generate(**inputs, cache=ArchiveCache(archive, budget=EVERYTHING), **options)
    assert out[0, len(ids) :].tolist() == dense_answer(stock, prompt, 6)


# Another model


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(loaded("llama"), tmp_path_factory.mktemp("identity") / "archive")


def assert_refused(folder: Path, model: LoadedModel, field: str) -> None:
    """The message names the field and both sides of it."""
    archived = Archive.open(folder, loaded("llama")).manifest.fingerprint
    with pytest.raises(ModelMismatchError, match=f"its {field} is .* and the loaded model's is ") as raised:
        Archive.open(folder, model)
    ours, theirs = refusal(raised).partition(f"its {field} is ")[2].split(" and the loaded model's is ")
    assert ours != theirs.partition(";")[0]
    if field.endswith("sha256"):
        assert ours == f"{getattr(archived, field)[:12]}..."


def test_the_same_weights_loaded_twice_open(llama: Path) -> None:
    again = LoadedModel(model=attach(tiny_model("llama")), tokenizer=tiny_tokenizer(), name="another name")
    assert Archive.open(llama, again).n_tokens == n_prompt(SHORT)


def test_another_initialisation_of_the_same_shape_is_refused(llama: Path) -> None:
    other = LoadedModel(model=attach(tiny_model("llama", seed=1)), tokenizer=tiny_tokenizer(), name="tiny-llama")
    assert_refused(llama, other, "weights_sha256")


def test_one_changed_weight_is_refused(llama: Path) -> None:
    model = tiny_model("llama")
    model.model.layers[2].mlp.down_proj.weight.data[3, 3] += 1e-3
    assert_refused(llama, LoadedModel(model=attach(model), tokenizer=tiny_tokenizer(), name="tuned"), "weights_sha256")


def test_a_tokenizer_with_one_more_token_is_refused(llama: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken("<lighthouse-keeper>")])
    assert_refused(llama, LoadedModel(loaded("llama").model, tokenizer, "tiny-llama"), "tokenizer_sha256")


def test_a_tokenizer_that_cuts_text_differently_is_refused(llama: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    assert_refused(llama, LoadedModel(loaded("llama").model, tokenizer, "tiny-llama"), "tokenizer_sha256")


def with_config(**values: Any) -> LoadedModel:
    """The weights of the tiny Llama under another configuration."""
    model = AutoModelForCausalLM.from_config(changed("llama", **values), dtype=torch.float32).eval()
    model.load_state_dict(tiny_model("llama").state_dict())
    return LoadedModel(model=attach(model), tokenizer=tiny_tokenizer(), name="tiny-llama")


def test_another_rope_theta_is_refused(llama: Path) -> None:
    model = with_config(rope_parameters={"rope_type": "default", "rope_theta": 500_000.0})
    with pytest.raises(ModelMismatchError) as raised:
        Archive.open(llama, model)
    refusal(raised)


def test_another_config_with_the_same_weights_is_refused(llama: Path) -> None:
    assert_refused(llama, with_config(rms_norm_eps=1e-3), "config_sha256")


def test_another_architecture_is_refused(llama: Path) -> None:
    assert_refused(llama, loaded("qwen2"), "model_type")


def test_padding_and_truncation_settings_do_not_count(llama: Path) -> None:
    tokenizer = tiny_tokenizer()
    before = tokenizer_sha256(tokenizer)
    tokenizer(["a", "b c d"], padding="max_length", truncation=True, max_length=3)
    tokenizer.padding_side = "right"
    tokenizer.model_max_length = 77
    assert tokenizer_sha256(tokenizer) == before
    Archive.open(llama, LoadedModel(loaded("llama").model, tokenizer, "tiny-llama"))


def test_a_truncating_tokenizer_file_does_not_shorten_the_document(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(max_length=5)
    tokenizer.model_max_length = 5
    model = LoadedModel(loaded("llama").model, tokenizer, "tiny-llama")
    assert Archive.open(build(model, tmp_path / "archive"), model).n_tokens == n_prompt(SHORT)


# Architectures that cannot be archived


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (DeepseekV3Config(num_hidden_layers=2), "multi-head latent attention"),
        (Gemma3nTextConfig(), "shares KV between layers"),
        (Qwen3NextConfig(num_hidden_layers=4), "linear_attention"),
        (GPT2Config(), "model type 'gpt2' is not supported"),
        (changed("llama", rope_parameters={"rope_type": "default", "rope_theta": 1e4}), ""),
    ],
)
def test_unsupported_architectures_are_refused_with_the_reason(config: PreTrainedConfig, reason: str) -> None:
    if not reason:
        assert model_shape(config).static_positions is None  # the control: this one is supported
        return
    with pytest.raises(UnsupportedModelError) as raised:
        model_shape(config)
    assert reason in refusal(raised)


def test_an_unknown_rope_type_is_refused() -> None:
    config = tiny_config("llama")
    config.rope_parameters = {"rope_type": "spiral", "rope_theta": 10_000.0}
    with pytest.raises(UnsupportedModelError, match="'spiral'") as raised:
        model_shape(config)
    refusal(raised)


# RoPE of a fixed length


STATIC = {
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0},
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "rope_theta": 10_000.0,
        "original_max_position_embeddings": 128,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "rope_theta": 10_000.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "partial": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
}


@pytest.mark.parametrize("kind", STATIC)
def test_static_rope_equals_dense_beyond_its_original_length(kind: str, tmp_path: Path) -> None:
    name = "phi3" if kind == "partial" else "llama"
    model = model_of(changed(name, rope_parameters=STATIC[kind]))
    archive = Archive.open(build(model, tmp_path / "archive"), model)
    assert archive.n_tokens > 2 * 128
    assert_equals_dense(archive)


def test_the_rope_parameters_change_the_answer() -> None:
    """Guards the test above: all of these really rotate differently."""
    ids = tiny_tokenizer()(SHORT, add_special_tokens=False)["input_ids"]
    kinds = [kind for kind in STATIC if kind != "partial"]
    logits = [dense_logits(model_of(changed("llama", rope_parameters=STATIC[kind])).model, ids, 1) for kind in kinds]
    for index, one in enumerate(logits):
        assert all((one - other).abs().max() > 1e-2 for other in logits[index + 1 :])


# RoPE that depends on the length


def dynamic(limit: int) -> LoadedModel:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    return model_of(changed("llama", max_position_embeddings=limit, rope_parameters=rope))


def longrope(limit: int) -> LoadedModel:
    """Phi-3 with head_dim 16: eight rotated pairs."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [4.0 + i for i in range(8)],
        "original_max_position_embeddings": limit,
    }
    config = changed("phi3", original_max_position_embeddings=limit, rope_parameters=rope)
    return model_of(config)


KINDS = {"dynamic": dynamic, "longrope": longrope}


@pytest.mark.parametrize("kind", KINDS)
def test_within_its_original_length_it_equals_dense(kind: str, tmp_path: Path) -> None:
    model = KINDS[kind](1024)
    assert_equals_dense(Archive.open(build(model, tmp_path / "archive"), model))


@pytest.mark.parametrize("kind", KINDS)
def test_a_document_beyond_the_original_length_is_refused_at_build(kind: str, tmp_path: Path) -> None:
    limit = n_prompt(SHORT) - 1
    with pytest.raises(RagkvError) as raised:
        build(KINDS[kind](limit), tmp_path / "archive")
    assert str(limit) in refusal(raised)
    assert not (tmp_path / "archive").exists()


def test_longrope_is_refused_although_the_context_is_longer(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="longrope"):
        build(longrope(n_prompt(SHORT) - 1), tmp_path / "archive")


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_that_crosses_the_original_length_is_refused(kind: str, tmp_path: Path) -> None:
    n_question = len(tiny_tokenizer()(PLAIN.question.replace("{question}", QUESTION))["input_ids"])
    limit = n_prompt(SHORT) + n_question + 3
    model = KINDS[kind](limit)
    model.model.generation_config.eos_token_id = None
    archive = Archive.open(build(model, tmp_path / "archive"), model)
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    inputs = archive.questions([QUESTION])
    out = model.model.generate(**inputs, cache=ArchiveCache(archive, budget=EVERYTHING), **options)
    prompt = archive.tokens.ids.tolist() + inputs["input_ids"][0].tolist()
    assert out[0, n_question:].tolist() == dense_answer(stock_copy(model.model), prompt, 4)  # the last is not fed back
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    with pytest.raises(UnsupportedModelError, match=str(limit)) as raised:
        model.model.generate(**inputs, cache=ArchiveCache(archive), **options)
    refusal(raised)


@pytest.mark.parametrize("kind", KINDS)
def test_a_question_that_crosses_the_original_length_is_refused(kind: str, tmp_path: Path) -> None:
    model = KINDS[kind](n_prompt(SHORT) + 2)
    archive = Archive.open(build(model, tmp_path / "archive"), model)
    with pytest.raises(UnsupportedModelError) as raised:
        ask(archive, QUESTION, max_new_tokens=2)
    refusal(raised)
