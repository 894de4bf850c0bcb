"""Compositions at their borders: windows at reused positions, unequal documents, batches, threads, refusals."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Cache, Phi3Config, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from typer.testing import CliRunner

from ragkv import Archive, ArchiveCache, LoadedModel, PromptLayout, ask, attach, build_archive
from ragkv.cli.app import app
from ragkv.errors import ConfigError, UnsupportedModelError
from ragkv.model.shape import model_shape
from ragkv.recall.composition import CONSECUTIVE, POSITIONS, REUSED, Composition
from ragkv.recall.placed import Weighting
from ragkv.recall.prefilled import PrefilledDocument, prefill_document
from ragkv.recall.recompute import recompute
from ragkv.recipe import RecallPolicy
from tests.archives import CODED, DOCUMENT, EVERYTHING, QUESTIONS, SMALL, archive_of, loaded
from tests.dense import stock_copy
from tests.test_compose import full_cache, moved
from tests.tiny import WINDOW, tiny_tokenizer

PLAIN = PromptLayout.plain()
PREFIX, HEAD, TAIL = 21, 60, 16
TEXTS = (
    "a",
    DOCUMENT[:500],
    " the" * (HEAD - PREFIX + TAIL + 1),  # one token between head and tail
    "\U0001f469\u200d\U0001f467 \u0645\u0631\u062d\u0628\u0627 e\u0301 \0\r\n" * 6,
    "<|bos|>Read<|eos|> " * 8,
    " the" * 300,
)
MODELS = ("llama", "mistral_window", "gemma2", "gemma3", "gpt_oss")
RECIPE = replace(SMALL, sink_tokens=HEAD, window_tokens=TAIL)


class Reference:
    """The stock model over keys of documents, moved; masks go by position, also those of sliding layers."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.shape = stock_copy(model), model_shape(model.config)
        self.keys: list[list[torch.Tensor]] = [[] for _ in self.shape.layers]
        self.values: list[list[torch.Tensor]] = [[] for _ in self.shape.layers]
        self.positions = torch.empty(0, dtype=torch.int64)

    def put(self, layers: Sequence[tuple[torch.Tensor, torch.Tensor]], positions: torch.Tensor, shift: int = 0) -> None:
        for index, (keys, values) in enumerate(layers):
            self.keys[index].append(moved(self.model, keys, shift, index))
            self.values[index].append(values)
        self.positions = torch.cat([self.positions, positions + shift])

    @torch.no_grad()
    def read(self, ids: list[int], start: int) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        """Logits of tokens that stand from `start` on, and their own keys and values."""
        cache = Cache(layer_class_to_replicate=DynamicLayer)
        for index in range(len(self.keys)):
            cache.update(torch.cat(self.keys[index], dim=2), torch.cat(self.values[index], dim=2), index)
        own = torch.arange(len(ids)) + start
        every = torch.cat([self.positions, own])
        causal = torch.arange(len(every)) <= (torch.arange(len(ids)) + len(self.positions)).unsqueeze(1)
        inside = causal & (every > own.unsqueeze(1) - WINDOW)
        full, sliding = (torch.zeros(m.shape).masked_fill(~m, -1e30)[None, None] for m in (causal, inside))
        mask: object = {"full_attention": full, "sliding_attention": sliding}
        if not (self.shape.sliding_layers and self.shape.global_layers):
            mask = sliding if self.shape.sliding_layers else full
        logits = self.model(torch.tensor([ids]), position_ids=own[None], cache=cache, attention_mask=mask).logits[0]
        n = len(ids)
        return logits, [(layer.keys[:, :, -n:], layer.values[:, :, -n:]) for layer in cache.layers]


def reference_logits(archives: Sequence[Archive], composition: Composition, ids: list[int]) -> torch.Tensor:
    """Logits of the question `ids` behind documents, their first tokens computed again where the composition says."""
    reference, prefix = Reference(archives[0].model.model), composition.prefix_tokens
    for place, archive in enumerate(archives):
        cache, shift = full_cache(reference.model, archive.tokens.ids), composition.shifts[place]
        first = 0 if place == 0 else prefix
        if again := composition.recomputed_tokens[place]:
            start = prefix + shift
            _, layers = reference.read(archive.tokens.ids[prefix : prefix + again].tolist(), start)
            reference.positions = torch.cat([reference.positions, torch.arange(again) + start])
            for index, (keys, values) in enumerate(layers):
                reference.keys[index].append(keys)
                reference.values[index].append(values)
            first += again
        rest = [(layer.keys[:, :, first:], layer.values[:, :, first:]) for layer in cache.layers]
        reference.put(rest, torch.arange(first, archive.n_tokens), shift)
    return reference.read(ids, composition.n_tokens)[0]


@torch.no_grad()
def logits(composition: Composition, policy: RecallPolicy | None = None) -> torch.Tensor:
    inputs = composition.questions([QUESTIONS[2]])
    cache = ArchiveCache(composition, policy=policy or RecallPolicy(budget=EVERYTHING))
    return composition.model.model(**inputs, cache=cache).logits[0]


@pytest.fixture(scope="module", params=MODELS)
def archives(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Archive]:
    folder, bos = tmp_path_factory.mktemp("cases"), request.param in ("gemma2", "llama")
    return [
        archive_of(folder / str(place), model=request.param, document=text, recipe=RECIPE, adds_bos=bos)
        for place, text in enumerate(TEXTS)
    ]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> list[Archive]:
    """Three documents of unequal recipes."""
    folder, model = tmp_path_factory.mktemp("llama"), loaded("llama")
    coarse = replace(CODED, tokens_per_cluster=16, key_codec="int2", value_codec="int2")
    found = []
    for place, recipe in enumerate((SMALL, coarse, replace(CODED, sink_tokens=60))):
        text = DOCUMENT[700 * place : 700 * (place + 1)]
        found.append(build_archive(model, text, folder / str(place), recipe=recipe, layout=PLAIN).path)
    return [Archive.open(path, model) for path in found]


# Exactness


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("order", [[5, 0, 1, 2], [2, 2, 3, 4]], ids=str)
def test_windows_go_by_position_wherever_documents_stand(
    archives: list[Archive], order: list[int], positions: str
) -> None:
    chosen = [archives[number] for number in order]
    composition = Composition(chosen, positions=positions)
    ids = composition.questions([QUESTIONS[2]])["input_ids"][0].tolist()
    torch.testing.assert_close(logits(composition), reference_logits(chosen, composition, ids), atol=2e-4, rtol=0)


@pytest.mark.parametrize("count", [1, 25])
@pytest.mark.parametrize("order", [[0, 0, 2], [3, 1, 0, 4]], ids=str)
def test_recomputed_tokens_are_those_of_the_model_behind_the_documents_before(
    archives: list[Archive], order: list[int], count: int
) -> None:
    """Also where a document is shorter than that, and where a window ends inside of it."""
    chosen = [archives[number] for number in order]
    composition = recompute(Composition(chosen), count)
    ids = composition.questions([QUESTIONS[2]])["input_ids"][0].tolist()
    torch.testing.assert_close(logits(composition), reference_logits(chosen, composition, ids), atol=2e-4, rtol=0)


@pytest.mark.parametrize(
    "policy", [RecallPolicy(mass=1.0, floor=EVERYTHING, cap=EVERYTHING), RecallPolicy(top_m=EVERYTHING)]
)
def test_every_policy_that_recalls_everything_is_the_same(llama: list[Archive], policy: RecallPolicy) -> None:
    composition = Composition(llama)
    torch.testing.assert_close(logits(composition, policy), logits(composition), atol=1e-4, rtol=0)
    dense = RecallPolicy(dense_layers=tuple(range(len(composition.shape.layers))))
    torch.testing.assert_close(logits(composition, dense), logits(composition), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "policy",
    [RecallPolicy(budget=1), RecallPolicy(budget=30), RecallPolicy(mass=0.5, floor=1, cap=40), RecallPolicy(top_m=2)],
    ids=("one", "some", "mass", "top"),
)
def test_a_batch_over_unequal_documents_is_each_question_alone(llama: list[Archive], policy: RecallPolicy) -> None:
    composition, model = Composition(llama), llama[0].model.model
    ids = [composition.questions([question])["input_ids"][0].tolist() for question in QUESTIONS]
    with torch.no_grad():
        together = model(**composition.pad(ids), cache=ArchiveCache(composition, policy=policy)).logits
        for row, own in enumerate(ids):
            alone = model(**composition.pad([own]), cache=ArchiveCache(composition, policy=policy)).logits[0]
            torch.testing.assert_close(together[row, -len(own) :], alone, atol=1e-4, rtol=0)


def test_forty_documents_answer_and_recompute() -> None:
    model = loaded("gemma3")
    many = [prefill_document(model, f"Keeper {number} wrote {number * 7}.", layout=PLAIN) for number in range(40)]
    composition = Composition(many)
    assert composition.n_context == sum(document.n_tokens for document in many) - 39 * many[0].prefix_tokens
    assert recompute(composition, 2).recomputed_tokens == (0, *(2,) * 39)
    dense = ask(composition, "Who?", mode="dense", max_new_tokens=2)
    assert (
        dense.archive_tokens
        == composition.n_context
        == dense.prefilled_tokens - len(composition.questions(["Who?"])["input_ids"][0])
    )


def test_threads_that_share_a_new_composition_get_one_answer(llama: list[Archive]) -> None:
    composition, answers = Composition(llama, weighting=Weighting(0.9, 0.9)), []
    threads = [
        threading.Thread(target=lambda: answers.append(ask(composition, "Who?", budget=20, max_new_tokens=4).text))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [ask(composition, "Who?", budget=20, max_new_tokens=4).text] * 6


# What a composition says of itself


def test_the_policy_is_that_of_the_first_archive_and_not_of_a_text_without_one(tmp_path: Path) -> None:
    policy = RecallPolicy(budget=7)
    archive = archive_of(tmp_path / "a", document=DOCUMENT[:800], recipe=replace(SMALL, recall=policy))
    text = prefill_document(archive.model, "Agnes kept the book.", layout=PLAIN)
    assert Composition([text, archive]).policy == policy
    assert Composition([text]).policy == RecallPolicy()


@pytest.mark.parametrize("positions", POSITIONS)
def test_resident_bytes_count_the_windows_that_were_moved(positions: str) -> None:
    """Two documents longer than the window: the question sees its end once, or that of each."""
    model = loaded("gemma3")
    pair = [prefill_document(model, text, layout=PLAIN) for text in (" the" * 90, " and" * 90)]
    composition = Composition(pair, positions=positions)
    logits(composition)
    shape = composition.shape
    per_token = 2 * shape.layers[0].n_kv_heads * shape.layers[0].head_dim * 4
    ends = [document.n_tokens for document in pair]
    seen = WINDOW - 1
    if positions == REUSED:
        seen += max(0, min(ends) - (max(ends) - (WINDOW - 1)))
    moved_bytes = seen * per_token * len(shape.sliding_layers)
    assert composition.resident_bytes == sum(document.resident_bytes for document in pair) + moved_bytes


# A layout without a prefix


def test_documents_without_a_prefix_compose() -> None:
    layout = PromptLayout(prefix="", question="{question}")
    model = loaded("llama")
    first, second = (prefill_document(model, text, layout=layout) for text in ("hello there", "general"))
    composition = Composition([first, second])
    assert composition.prefix_tokens == 0
    assert composition.n_tokens == first.n_tokens + second.n_tokens
    assert recompute(composition, 1).recomputed_tokens == (0, 1)
    assert composition.token_ids.tolist() == [*first.tokens.ids.tolist(), *second.tokens.ids.tolist()]


# Refusals


def fills(model: LoadedModel, n_tokens: int) -> PrefilledDocument:
    short = prefill_document(model, " the", layout=PLAIN)
    return prefill_document(model, " the" * (n_tokens - short.prefix_tokens), layout=PLAIN)


def test_what_fills_the_context_is_refused_with_a_cure_that_helps() -> None:
    model = loaded("llama")
    whole, short = fills(model, 4096), fills(model, 100)
    with pytest.raises(ConfigError, match=r"4,175 tokens .* holds 4,096; give fewer, or put all at the same"):
        Composition([whole, short], positions=CONSECUTIVE)
    with pytest.raises(ConfigError, match=r"longest document .* 4,096 tokens .* leave that one out"):
        Composition([whole, short], positions=REUSED)


def test_beyond_a_length_dependent_rope_is_refused_before_the_model_is_touched() -> None:
    n_frequencies = 8
    config = Phi3Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        original_max_position_embeddings=128,
        sliding_window=None,
        pad_token_id=2,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "short_factor": [1.0] * n_frequencies,
            "long_factor": [4.0] * n_frequencies,
            "original_max_position_embeddings": 128,
        },
    )
    model = attach(AutoModelForCausalLM.from_config(config).eval())
    subject = LoadedModel(model=model, tokenizer=tiny_tokenizer(), name="long")
    parts = [prefill_document(subject, DOCUMENT[100 * n : 100 * n + 140], layout=PLAIN) for n in range(8)]
    before = model.model.rotary_emb.inv_freq.clone()
    with pytest.raises(UnsupportedModelError, match="changes its frequencies beyond 128"):
        Composition(parts)
    assert torch.equal(model.model.rotary_emb.inv_freq, before)
    assert Composition(parts, positions=REUSED).n_tokens < 128


def test_a_composition_is_no_document(llama: list[Archive]) -> None:
    with pytest.raises(ConfigError, match="give the documents that it is of"):
        Composition([llama[0], Composition(llama[1:])])


@pytest.mark.parametrize(
    ("rows", "said"), [([], "no questions"), ([[]], "question 0 has"), ([[5], []], "question 1 has")]
)
def test_inputs_without_tokens_are_refused(llama: list[Archive], rows: list[list[int]], said: str) -> None:
    for source in (llama[0], Composition(llama)):
        with pytest.raises(ConfigError, match=said):
            source.pad(rows)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--positions", "sideways"), "--positions is 'sideways'; give one of consecutive, reused"),
        (("--recompute", "-1"), "--recompute is -1"),
        (("--recompute", "4", "--positions", "reused"), "--recompute needs --positions consecutive"),
        (("--catalog", "nowhere"), "give --archive or --catalog, not both"),
        (("--temperature", "0"), "temperature is 0.0"),
        (("--scale", "nan"), "scale is nan"),
    ],
)
def test_options_that_no_composition_takes_are_refused_before_anything_is_read(
    words: tuple[str, ...], said: str
) -> None:
    result = CliRunner().invoke(app, ["ask", "Who?", "--archive", "nowhere", *words], prog_name="ragkv")
    assert isinstance(result.exception, ConfigError)
    assert said in str(result.exception)


def test_one_archive_is_asked_without_its_files(tmp_path: Path) -> None:
    archive = archive_of(tmp_path / "a", document=DOCUMENT[:800])
    (tmp_path / "a").rename(tmp_path / "b")
    assert (
        ask(archive, "Who?", max_new_tokens=3).text
        == ask(Archive.open(tmp_path / "b", archive.model), "Who?", max_new_tokens=3).text
    )


def test_a_moved_archive_goes_on_answering(tmp_path: Path) -> None:
    pair = [archive_of(tmp_path / name, document=DOCUMENT[:800]) for name in ("a", "b")]
    composition = Composition(pair)
    before = ask(composition, "Who?", max_new_tokens=3).text
    for name in ("a", "b"):
        (tmp_path / name).rename(tmp_path / f"{name} moved")
    assert ask(composition, "Who?", max_new_tokens=3).text == before
