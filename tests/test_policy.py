"""What is recalled: the policy's own rules, its way through recipe files and commands, and what a model then sees."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from ragkv import Archive, ArchiveCache, RecallTrace, Recipe, load_model
from ragkv.cli.app import app
from ragkv.errors import ConfigError
from ragkv.recall.attention import choose_clusters
from ragkv.recipe import CODECS, EVERYTHING, EXACT_CODECS, Limit, RecallPolicy
from tests.archives import CODED, DOCUMENT, QUESTIONS, SMALL, archive_of
from tests.dense import dense_logits, stock_copy
from tests.tiny import tiny_model, tiny_tokenizer

# Validation


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"budget": 0}, "budget is 0; give a whole number of at least 1"),
        ({"budget": 2.5}, "budget is 2.5"),
        ({"budget": True}, "budget is True"),
        ({"budget": None}, "budget is None"),
        ({"top_m": 0}, "top_m is 0"),
        ({"floor": -1}, "floor is -1"),
        ({"cap": "64"}, "cap is '64'"),
        ({"mass": 0}, "mass is 0; give a share of the attention above 0 and up to 1"),
        ({"mass": 1.01}, r"mass is 1\.01"),
        ({"mass": float("nan")}, "mass is nan"),
        ({"mass": True}, "mass is True"),
        ({"mass": "0.5"}, "mass is '0.5'"),
        ({"top_m": 3, "mass": 0.5}, "top_m and mass are both given; choose one"),
        ({"floor": 80, "cap": 70}, "floor is 80 and cap is 70; the floor must not be above the cap"),
        ({"dense_layers": [-1]}, r"dense_layers is \[-1\]; give layer numbers from 0"),
        ({"dense_layers": ["1"]}, r"dense_layers is \['1'\]"),
        ({"dense_layers": 3}, "dense_layers is 3"),
        ({"layer_budgets": {"one": 5}}, "layer_budgets has 'one' = 5; give layer numbers"),
        ({"layer_budgets": {"1": 0}}, "layer_budgets has '1' = 0"),
        ({"layer_budgets": [5]}, r"layer_budgets is \[5\]"),
        ({"layer_budgets": {"1": 5}, "mass": 0.5}, "layer_budgets count tokens and go with budget"),
        ({"layer_budgets": {"1": 5}, "top_m": 5}, "layer_budgets count tokens and go with budget"),
        ({"budget": 1 << 63}, r"budget is too large; give at most 2\^63 - 1"),
        ({"layer_budgets": {"9" * 5000: 5}}, "layer_budgets has '999"),
        ({"layer_budgets": {"1": 5, "01": 6}}, "layer_budgets names a layer twice: 1, 01"),
        ({"budgets": 5}, "unknown key 'budgets'; known are budget, top_m"),
    ],
)
def test_a_wrong_policy_is_one_clear_sentence(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=rf"^recall: {said}") as raised:
        RecallPolicy.from_dict(values)
    assert "\n" not in str(raised.value)


def test_layers_that_the_model_lacks_are_refused() -> None:
    for policy in (RecallPolicy(dense_layers=(1, 3)), RecallPolicy(layer_budgets={"3": 9})):
        policy.check_layers(4)
        with pytest.raises(ConfigError, match="there is no layer 3; the model has layers 0 to 2"):
            policy.check_layers(3)


def test_a_number_names_a_layer_as_its_text_does() -> None:
    by_number = RecallPolicy.from_dict({"layer_budgets": {1: 7, "02": 8}})
    assert by_number == RecallPolicy(layer_budgets={"1": 7, "2": 8})
    assert by_number.limit(1, question=False).tokens == 7


# Recipe files


def policies() -> st.SearchStrategy[RecallPolicy]:
    whole = st.integers(1, 5000)
    dense = st.lists(st.integers(0, 40), max_size=3).map(tuple)
    budgets = st.dictionaries(st.integers(0, 40).map(str), whole, max_size=3)
    bounds = st.tuples(whole, whole).map(sorted)
    share = st.floats(0, 1, exclude_min=True)
    return st.one_of(
        st.builds(RecallPolicy, budget=whole, dense_layers=dense, layer_budgets=budgets),
        st.builds(RecallPolicy, top_m=whole, dense_layers=dense),
        st.builds(
            lambda mass, b, layers: RecallPolicy(mass=mass, floor=b[0], cap=b[1], dense_layers=layers),
            share,
            bounds,
            dense,
        ),
    )


codecs = st.sampled_from(CODECS)
recipes = st.builds(
    Recipe,
    tokens_per_cluster=st.integers(1, 99),
    exact_codec=st.sampled_from(EXACT_CODECS),
    key_prototype_bits=st.integers(1, 8),
    value_prototype_bits=st.integers(1, 8),
    key_codec=codecs,
    value_codec=codecs,
    layer_codecs=st.dictionaries(
        st.integers(0, 99).map(str), st.dictionaries(st.sampled_from(["key_codec", "value_codec"]), codecs), max_size=3
    ),
    recall=policies(),
)


@settings(max_examples=60, deadline=None)
@given(recipe=recipes)
def test_any_recipe_comes_back_from_its_toml_and_its_json(
    recipe: Recipe, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("recipe") / "r.toml"
    path.write_text(recipe.to_toml(), encoding="utf-8")
    assert Recipe.from_toml(path) == recipe
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe


def test_what_is_not_given_is_not_written() -> None:
    text = Recipe().to_toml()
    assert "None" not in text
    assert "null" not in text
    assert "top_m" not in text
    assert "mass" not in RecallPolicy(top_m=4).to_dict()


def test_layers_are_written_as_tables_of_their_own() -> None:
    recipe = Recipe(layer_codecs={"3": {"key_codec": "int8"}}, recall=RecallPolicy(layer_budgets={"5": 7}))
    text = recipe.to_toml()
    assert '[layer_codecs.3]\nkey_codec = "int8"\n' in text
    assert "[recall.layer_budgets]\n5 = 7\n" in text
    assert recipe.codecs(3) == ("int8", recipe.value_codec)
    assert recipe.codecs(4) == (recipe.key_codec, recipe.value_codec)


# Limits


def test_limits_by_hand() -> None:
    tokens = RecallPolicy(budget=101, layer_budgets={"2": 33})
    assert tokens.limit(0, question=False) == Limit(tokens=101)
    assert tokens.limit(0, question=True) == Limit(tokens=151)  # half as much again, rounded down
    assert tokens.limit(2, question=False) == Limit(tokens=33)
    assert tokens.limit(2, question=True) == Limit(tokens=49)
    clusters = RecallPolicy(budget=101, top_m=5)
    assert clusters.limit(0, question=False) == Limit(tokens=EVERYTHING, clusters=5)
    assert clusters.limit(0, question=True) == Limit(tokens=EVERYTHING, clusters=7)
    mass = RecallPolicy(mass=0.9, floor=9, cap=90)
    assert mass.limit(0, question=False) == Limit(tokens=90, mass=0.9, floor=9)
    assert mass.limit(0, question=True) == Limit(tokens=135, mass=0.9, floor=13)


def test_a_budget_replaces_every_other_limit_and_keeps_the_dense_layers() -> None:
    assert RecallPolicy(mass=0.5, dense_layers=(1,)).with_budget(9) == RecallPolicy(budget=9, dense_layers=(1,))
    assert RecallPolicy(top_m=5).with_budget(9) == RecallPolicy(budget=9)
    assert RecallPolicy(layer_budgets={"1": 5}).with_budget(9) == RecallPolicy(budget=9)


MASS = torch.tensor([[[0.1, 0.4, 0.2, 0.25]]])  # 0.05 of the attention goes to exact tokens
SIZES = torch.tensor([[5, 2, 4, 3]])


@pytest.mark.parametrize(
    ("limit", "hit"),
    [
        (Limit(tokens=1), [1]),
        (Limit(tokens=2), [1]),
        (Limit(tokens=3), [1, 3]),
        (Limit(tokens=6), [1, 3, 2]),
        (Limit(), [1, 3, 2, 0]),
        (Limit(clusters=1), [1]),
        (Limit(clusters=3), [1, 3, 2]),
        (Limit(clusters=99), [1, 3, 2, 0]),
        (Limit(clusters=3, tokens=4), [1, 3]),
        (Limit(mass=0.4), [1]),  # 0.95 estimated, then 0.55: as soon as no more than 0.6 is left
        (Limit(mass=0.5), [1, 3]),  # 0.55 is above 0.5; 0.3 is not
        (Limit(mass=0.8), [1, 3, 2]),
        (Limit(mass=1.0), [1, 3, 2, 0]),
        (Limit(mass=0.05, floor=3), [1, 3]),
        (Limit(mass=0.99, tokens=5), [1, 3]),
    ],
)
def test_clusters_are_chosen_by_hand_for_each_kind_of_limit(limit: Limit, hit: list[int]) -> None:
    choice = choose_clusters(MASS, SIZES, limit)
    found = [cluster for cluster in choice.hit_ids()[0, 0].tolist() if cluster >= 0]
    assert found == hit
    assert choice.tokens.tolist() == [[int(SIZES[0, hit].sum())]]


def test_worth_orders_and_mass_alone_counts() -> None:
    worth = MASS * torch.tensor([10.0, 1.0, 1.0, 1.0])
    choice = choose_clusters(worth, SIZES, Limit(mass=0.5), mass=MASS)
    assert choice.hit_ids().tolist() == [[[0, 1, -1, -1]]]  # 0.95 estimated, 0.85 without 0, 0.45 without 1


# On a model


@pytest.fixture(scope="module")
def lossless(tmp_path_factory: pytest.TempPathFactory) -> Archive:
    return archive_of(tmp_path_factory.mktemp("policy") / "lossless", document=DOCUMENT[:1100])


@pytest.fixture(scope="module")
def coded(tmp_path_factory: pytest.TempPathFactory) -> Archive:
    recipe = dataclasses.replace(CODED, recall=RecallPolicy(budget=11, dense_layers=(1,)))
    return archive_of(tmp_path_factory.mktemp("policy") / "coded", document=DOCUMENT[:1100], recipe=recipe)


@torch.no_grad()
def logits(archive: Archive, policy: RecallPolicy | None, observer: RecallTrace | None = None) -> torch.Tensor:
    cache = ArchiveCache(archive, policy=policy, observer=observer)
    return archive.model.model(**archive.questions([QUESTIONS[2]]), cache=cache).logits[0]


def traced(archive: Archive, policy: RecallPolicy | None) -> RecallTrace:
    trace = RecallTrace()
    logits(archive, policy, trace)
    return trace


def test_all_layers_dense_give_the_dense_logits(lossless: Archive) -> None:
    ids = lossless.questions([QUESTIONS[2]])["input_ids"][0].tolist()
    expected = dense_logits(stock_copy(lossless.model.model), lossless.tokens.ids.tolist() + ids, len(ids))
    found = logits(lossless, RecallPolicy(budget=1, dense_layers=(0, 1, 2)))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_all_layers_dense_equal_everything_recalled_of_codes(coded: Archive) -> None:
    everything = logits(coded, RecallPolicy(budget=1 << 20))
    dense = logits(coded, RecallPolicy(budget=1, dense_layers=(0, 1, 2)))
    torch.testing.assert_close(dense, everything, atol=5e-4, rtol=0)  # float32 sums in another order


def test_a_pilot_recalls_in_its_layer_alone(lossless: Archive) -> None:
    trace = traced(lossless, RecallPolicy(budget=5, dense_layers=(0, 2)))
    assert [[entry.layer for entry in step] for step in trace.steps] == [[1]]
    pilot, dense = (logits(lossless, RecallPolicy(budget=5, dense_layers=layers)) for layers in ((0, 2), (0, 1, 2)))
    assert not torch.allclose(pilot, dense, atol=1e-3)


def test_each_layer_keeps_to_its_own_budget(lossless: Archive) -> None:
    trace = traced(lossless, RecallPolicy(budget=10, layer_budgets={"0": 40, "2": 80}))
    for entry, wanted in zip(trace.steps[0], (60, 15, 120), strict=True):  # a question: half as much again
        table = lossless.layers[entry.layer].clusters
        assert table is not None
        assert bool((entry.tokens >= wanted).all())
        assert bool((entry.tokens < wanted + table.largest).all())


def test_all_the_mass_is_nearly_every_token(lossless: Archive) -> None:
    trace = traced(lossless, RecallPolicy(mass=1.0, cap=1 << 20))
    assert trace.unrecalled_mass < 1e-5
    assert trace.recalled_tokens > 0.9 * lossless.manifest.archived_tokens


def test_more_mass_recalls_more_and_leaves_less_than_was_asked(lossless: Archive) -> None:
    half, most = (traced(lossless, RecallPolicy(mass=mass, floor=1, cap=1 << 20)) for mass in (0.5, 0.9))
    assert half.recalled_tokens < most.recalled_tokens < lossless.manifest.archived_tokens
    assert half.unrecalled_mass > most.unrecalled_mass


def test_the_archive_s_own_policy_is_the_default(coded: Archive) -> None:
    own, default = traced(coded, coded.manifest.recipe.recall), traced(coded, None)
    assert coded.manifest.recipe.recall == RecallPolicy(budget=11, dense_layers=(1,))
    assert [entry.layer for entry in default.steps[0]] == [0, 2]
    assert default.recalled_tokens == own.recalled_tokens < traced(coded, RecallPolicy(budget=99)).recalled_tokens


def test_a_cache_refuses_a_policy_for_layers_that_are_not_there(lossless: Archive) -> None:
    with pytest.raises(ConfigError, match="there is no layer 3"):
        ArchiveCache(lossless, policy=RecallPolicy(dense_layers=(3,)))


# On the command line


def run(*words: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `ragkv WORDS`, errors handled as the console entry point does."""
    result = CliRunner().invoke(app, [str(word) for word in words], prog_name="ragkv")
    return result.exit_code, result.stdout, result.stderr if result.exception is None else str(result.exception)


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    """The words of ``ragkv ask`` for an archive of a saved tiny model."""
    folder = tmp_path_factory.mktemp("cli")
    tiny_model("llama").save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    (folder / "harbour.txt").write_text(DOCUMENT, encoding="utf-8")
    (folder / "small.toml").write_text(SMALL.to_toml(), encoding="utf-8")
    words = ("build", folder / "harbour.txt", "--model", folder / "model", "--out", folder)
    code, _, fault = run(*words, "--recipe", folder / "small.toml")
    assert code == 0, fault
    assert load_model(str(folder / "model")).model.config.num_hidden_layers == 3
    return ("ask", "Who kept the book?", "--archive", folder / "harbour", "--max-new-tokens", 2, "--json")


def answer(*words: object) -> dict[str, Any]:
    code, shown, fault = run(*words)
    assert code == 0, fault
    return json.loads(shown)


def test_ask_takes_clusters_mass_or_a_pilot(asked: tuple[object, ...]) -> None:
    by_budget, one = answer(*asked, "--budget", 40), answer(*asked, "--top-m", 1)
    assert one["recalled_tokens"] < by_budget["recalled_tokens"] < 80
    assert answer(*asked, "--mass", 1.0)["unrecalled_mass"] < by_budget["unrecalled_mass"]
    assert (
        answer(*asked, "--pilot-layer", 1, "--budget", 40)["kv_bytes"]["resident"] > by_budget["kv_bytes"]["resident"]
    )


def test_a_pilot_of_all_layers_is_no_pilot(asked: tuple[object, ...]) -> None:
    pilots = [word for layer in range(3) for word in ("--pilot-layer", layer)]
    piloted, plain = answer(*asked, *pilots), answer(*asked)
    for name in ("token_ids", "recalled_tokens", "unrecalled_mass"):
        assert piloted[name] == plain[name]


def test_ask_follows_the_policy_of_a_recipe_file(asked: tuple[object, ...], tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text("[recall]\ntop_m = 1\n", encoding="utf-8")
    assert answer(*asked, "--recipe", path)["recalled_tokens"] == answer(*asked, "--top-m", 1)["recalled_tokens"]
    wide = answer(*asked, "--recipe", path, "--budget", 90)
    assert wide["recalled_tokens"] == answer(*asked, "--budget", 90)["recalled_tokens"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--budget", 9, "--top-m", 2), "--budget and --top-m are given; choose one"),
        (("--mass", 0.5, "--top-m", 2), "--top-m and --mass are given; choose one"),
        (("--mass", 0.5, "--top-m", 2, "--budget", 1), "--budget and --top-m and --mass are given; choose one"),
        (("--pilot-layer", 3), "there is no layer 3; the model has layers 0 to 2"),
        (("--pilot-layer", -1), "give layer numbers from 0"),
        (("--top-m", 0), "top_m is 0"),
        (("--mass", 2), "mass is 2.0"),
        (("--recipe", "nowhere.toml"), "'nowhere.toml' cannot be read"),
    ],
)
def test_a_wrong_option_is_one_sentence(asked: tuple[object, ...], words: tuple[object, ...], said: str) -> None:
    code, shown, fault = run(*asked, *words)
    assert code != 0
    assert not shown
    assert said in fault
    assert "\n" not in fault
