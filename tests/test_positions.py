"""The question stands where the document ends, whatever was recalled; anything else is refused, never answered."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import ragkv.recall.cache
from ragkv import Archive, ArchiveCache, LoadedModel, PromptLayout, attach, build_archive
from ragkv.answer.ask import ask
from ragkv.errors import ConfigError
from ragkv.model.attention import AttentionCall
from ragkv.model.prefill import captured_layers, prefill_cache
from tests.archives import DOCUMENT, EVERYTHING, QUESTIONS, SMALL, archive_of
from tests.dense import dense_answer, dense_logits, stock_copy
from tests.tiny import TEXT, TINY_MODELS, tiny_model, tiny_tokenizer

SHORT = DOCUMENT[:900]


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Archive:
    return archive_of(tmp_path_factory.mktemp("positions") / "archive", document=SHORT)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Archive:
    """Its first layer is a sliding one, so a mask shows at most one window of the question."""
    return archive_of(tmp_path_factory.mktemp("positions") / "hybrid", model="gemma3", document=SHORT)


@pytest.fixture
def own(tmp_path: Path) -> Archive:
    """An archive with a model of its own, which a test may change."""
    model = LoadedModel(model=attach(tiny_model("llama")), tokenizer=tiny_tokenizer(), name="own")
    build_archive(model, SHORT, tmp_path / "archive", recipe=SMALL, layout=PromptLayout.plain())
    return Archive.open(tmp_path / "archive", model)


def step(model: PreTrainedModel, cache: ArchiveCache, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs, cache=cache).logits


def one_line(raised: pytest.ExceptionInfo[ConfigError]) -> str:
    assert "\n" not in str(raised.value)
    return str(raised.value)


# Where the question stands


def test_positions_of_a_padded_batch_start_where_the_document_ends(archive: Archive) -> None:
    inputs = archive.questions(QUESTIONS)
    n_document = archive.manifest.prefix_tokens + archive.manifest.document_tokens
    for row in range(len(QUESTIONS)):
        real = inputs["attention_mask"][row].bool()
        n_real = int(real.sum())
        assert inputs["position_ids"][row][real].tolist() == list(range(n_document, n_document + n_real))


@pytest.mark.parametrize("budget", [1, 50, EVERYTHING])
def test_attention_sees_the_same_positions_at_every_budget(
    archive: Archive, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[int]] = []
    attend = ragkv.recall.cache.ArchiveCacheLayer.attend

    def spy(self: ragkv.recall.cache.ArchiveCacheLayer, call: AttentionCall) -> torch.Tensor:
        assert call.positions is not None
        seen.append(call.positions[0].tolist())
        return attend(self, call)

    monkeypatch.setattr(ragkv.recall.cache.ArchiveCacheLayer, "attend", spy)
    inputs = archive.questions([QUESTIONS[1]])
    cache = ArchiveCache(archive, budget=budget)
    archive.model.model.generate(**inputs, cache=cache, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    n, n_question, n_layers = archive.n_tokens, inputs["input_ids"].shape[1], len(archive.layers)
    question = list(range(n, n + n_question))
    assert seen == [question] * n_layers + [[n + n_question]] * n_layers + [[n + n_question + 1]] * n_layers


@pytest.mark.parametrize("budget", [1, 50, EVERYTHING])
def test_only_the_question_is_prefilled_at_every_budget(archive: Archive, budget: int) -> None:
    answer = ask(archive, QUESTIONS[1], budget=budget, max_new_tokens=2)
    assert answer.prefilled_tokens == archive.questions([QUESTIONS[1]])["input_ids"].shape[1]
    assert answer.archive_tokens == archive.n_tokens


def test_dense_mode_prefills_document_and_question(archive: Archive) -> None:
    answer = ask(archive, QUESTIONS[1], mode="dense", max_new_tokens=2)
    assert answer.prefilled_tokens == archive.n_tokens + archive.questions([QUESTIONS[1]])["input_ids"].shape[1]


# Wrong positions


@pytest.mark.parametrize("kind", ["archive", "hybrid"])
def test_forgotten_position_ids_are_refused(kind: str, request: pytest.FixtureRequest) -> None:
    archive: Archive = request.getfixturevalue(kind)
    inputs = archive.questions([QUESTIONS[2]])
    del inputs["position_ids"]
    with pytest.raises(ConfigError) as raised:
        archive.model.model.generate(**inputs, cache=ArchiveCache(archive), max_new_tokens=2, do_sample=False)
    assert f"position 0, with this archive it must be {archive.n_tokens};" in one_line(raised)


@pytest.mark.parametrize("kind", ["archive", "hybrid"])
@pytest.mark.parametrize("shift", [-1, 1, 100])
def test_shifted_positions_are_refused(kind: str, shift: int, request: pytest.FixtureRequest) -> None:
    archive: Archive = request.getfixturevalue(kind)
    inputs = archive.questions([QUESTIONS[2]])
    inputs["position_ids"] = inputs["position_ids"] + shift
    with pytest.raises(ConfigError, match="position"):
        step(archive.model.model, ArchiveCache(archive), inputs)


def test_one_wrong_row_of_a_batch_is_refused(archive: Archive) -> None:
    inputs = archive.questions(QUESTIONS)
    inputs["position_ids"][1] += 1
    with pytest.raises(ConfigError, match="position"):
        step(archive.model.model, ArchiveCache(archive), inputs)


def test_positions_that_are_wrong_only_inside_the_question_are_refused(archive: Archive) -> None:
    inputs = archive.questions([QUESTIONS[1]])
    inputs["position_ids"][0, 0] = 0
    with pytest.raises(ConfigError, match="position"):
        step(archive.model.model, ArchiveCache(archive), inputs)


# A further turn on the same cache


def further_turn(archive: Archive) -> tuple[ArchiveCache, torch.Tensor, torch.Tensor]:
    """A cache that holds a question and an answer, its token ids, and those ids with a second question behind."""
    inputs = archive.questions([QUESTIONS[0]])
    cache = ArchiveCache(archive, budget=EVERYTHING)
    first = archive.model.model.generate(**inputs, cache=cache, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    return cache, first, torch.cat([first, archive.questions([QUESTIONS[1]])["input_ids"]], dim=1)


@pytest.mark.parametrize("kind", ["archive", "hybrid"])
def test_a_further_turn_with_positions_equals_dense(kind: str, request: pytest.FixtureRequest) -> None:
    archive: Archive = request.getfixturevalue(kind)
    model = archive.model.model
    cache, _, ids = further_turn(archive)
    new = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": archive.n_tokens + torch.arange(ids.shape[1]).unsqueeze(0),
    }
    out = model.generate(**new, cache=cache, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    expected = dense_answer(stock_copy(model), archive.tokens.ids.tolist() + ids[0].tolist(), 8)
    assert out[0, ids.shape[1] :].tolist() == expected


@pytest.mark.parametrize("kind", ["archive", "hybrid"])
def test_a_further_turn_without_positions_is_refused(kind: str, request: pytest.FixtureRequest) -> None:
    archive: Archive = request.getfixturevalue(kind)
    cache, _, ids = further_turn(archive)
    with pytest.raises(ConfigError, match="position"):
        archive.model.model.generate(
            ids, attention_mask=torch.ones_like(ids), cache=cache, max_new_tokens=2, do_sample=False
        )


# A model that would ignore the archive


def test_a_model_without_ragkv_attention_gets_no_cache(own: Archive) -> None:
    own.model.model.set_attn_implementation("sdpa")
    with pytest.raises(ConfigError, match=r"ragkv\.attach"):
        ArchiveCache(own)


@pytest.mark.parametrize("other", ["eager", "sdpa"])
def test_attention_changed_after_the_cache_was_made_is_refused(own: Archive, other: str) -> None:
    inputs = own.questions([QUESTIONS[0]])
    cache = ArchiveCache(own)
    own.model.model.set_attn_implementation(other)
    with pytest.raises(ConfigError, match=r"ragkv\.attach"):
        own.model.model.generate(**inputs, cache=cache, max_new_tokens=1, do_sample=False)


def test_another_model_that_ignores_the_cache_is_refused(archive: Archive) -> None:
    stock = stock_copy(archive.model.model)
    with pytest.raises(ConfigError, match=r"ragkv\.attach"):
        step(stock, ArchiveCache(archive), archive.questions([QUESTIONS[0]]))


@pytest.mark.parametrize("name", TINY_MODELS)
def test_an_attached_model_without_an_archive_is_the_stock_model(name: str) -> None:
    model = attach(tiny_model(name))
    stock = stock_copy(model)
    ids = tiny_tokenizer()(TEXT, add_special_tokens=False)["input_ids"]
    long, short = ids[:60], ids[60:100]
    torch.testing.assert_close(dense_logits(model, long, 60), dense_logits(stock, long, 60), atol=1e-4, rtol=0)
    batch = torch.tensor([long, [0] * 20 + short])
    mask = torch.ones_like(batch)
    mask[1, :20] = 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        logits = model(batch, attention_mask=mask, position_ids=positions).logits
    torch.testing.assert_close(logits[0], dense_logits(stock, long, 60), atol=1e-4, rtol=0)
    torch.testing.assert_close(logits[1, 20:], dense_logits(stock, short, 40), atol=1e-4, rtol=0)


# Keys carry their position


def rotated(keys: torch.Tensor, by: int) -> torch.Tensor:
    """Llama's rotation of (n_heads, n_tokens, 16) by a number of positions: pairs (i, i + 8), theta 10,000."""
    out = keys.double().clone()
    for i in range(8):
        angle = by * 10_000.0 ** (-i / 8)
        first, second = keys[..., i].double(), keys[..., i + 8].double()
        out[..., i] = first * math.cos(angle) - second * math.sin(angle)
        out[..., i + 8] = second * math.cos(angle) + first * math.sin(angle)
    return out


def test_a_shifted_document_has_rotated_keys_and_the_same_values() -> None:
    model = tiny_model("llama")
    ids = tiny_tokenizer()(TEXT, add_special_tokens=False)["input_ids"][:50]
    plain, shifted = (captured_layers(prefill_cache(model, each))[0] for each in (ids, [5] * 37 + ids))
    torch.testing.assert_close(shifted.keys[:, 37:].double(), rotated(plain.keys, 37), atol=1e-4, rtol=0)
    torch.testing.assert_close(shifted.values[:, 37:], plain.values, atol=1e-5, rtol=0)


def test_two_copies_of_a_document_differ_by_the_rotation() -> None:
    model = tiny_model("llama")
    ids = tiny_tokenizer()(TEXT, add_special_tokens=False)["input_ids"][:50]
    keys = captured_layers(prefill_cache(model, ids + ids))[0].keys
    assert not torch.allclose(keys[:, :50], keys[:, 50:], atol=0.1)
    torch.testing.assert_close(keys[:, 50:].double(), rotated(keys[:, :50], 50), atol=1e-4, rtol=0)
