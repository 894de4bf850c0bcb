"""Calibration: the rule on points made by hand, runs on a tiny model, and what is written."""

from __future__ import annotations

import csv
import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from ragkv import LoadedModel, PromptLayout, Recipe, attach
from ragkv.errors import ConfigError
from ragkv.evaluation.calibrate.outputs import build_report, recipe_text, result_dict, table_text, write_outputs
from ragkv.evaluation.calibrate.rule import (
    BASE,
    LayerCheck,
    LayerPoint,
    Point,
    Sweep,
    choose,
    layer_budgets,
    point_name,
)
from ragkv.evaluation.calibrate.search import Calibration, calibrate
from ragkv.evaluation.calibrate.words import About, verdict
from ragkv.evaluation.compare import Questions
from ragkv.evaluation.data.suite import Item
from ragkv.evaluation.report.page import render_report
from ragkv.evaluation.run import Task
from ragkv.evaluation.timing import Progress
from ragkv.recipe import RecallPolicy
from tests.archives import DOCUMENT, QUESTIONS, loaded
from tests.tiny import tiny_tokenizer

LAYOUT = PromptLayout.plain()
BASE_RECIPE = Recipe(window_tokens=16, sink_tokens=4)
ABOUT = About("tiny", {"harbour": 1620}, "Two questions.", None, "base", {"seed": 0})


def point(tokens_per_cluster: int, codec: str, budget: int, losses: tuple[float, ...], size: float) -> Point:
    """A point whose bytes are `size` resident and as much on disk; it reads a thousandth more for each token."""
    recipe = Sweep(BASE_RECIPE).recipe(tokens_per_cluster, codec, budget)
    name = point_name(tokens_per_cluster, codec, budget)
    n_same = tuple(1.0 for _ in losses)
    return Point(name, recipe, losses, n_same, (), read=size + budget / 1000, resident=size, disk=size)


def forged(check: LayerCheck | None = None) -> Calibration:
    """Two pairs and three budgets: 16 per cluster is as good as 8 and smaller, and its knee is at 128."""
    grid = (
        point(8, "int4", 64, (0.50, 0.52), 0.2),
        point(8, "int4", 128, (0.21, 0.21), 0.2),
        point(8, "int4", 256, (0.20, 0.20), 0.2),
        point(16, "int4", 64, (0.60, 0.62), 0.1),
        point(16, "int4", 128, (0.22, 0.18), 0.1),
        point(16, "int4", 256, (0.20, 0.20), 0.1),
    )
    layers = (LayerPoint(0, (0.1, 0.2)), LayerPoint(1, (0.3, 0.3)))
    return Calibration(grid, grid[2], (), choose(grid), layers, check)


def check_of(even: tuple[float, ...], by_layer: tuple[float, ...]) -> LayerCheck:
    candidate = dataclasses.replace(point(16, "int4", 128, by_layer, 0.1), name="budgets by layer")
    recall = RecallPolicy(budget=128, layer_budgets={"0": 256, "1": 64, "2": 64})
    recipe = dataclasses.replace(candidate.recipe, recall=recall)
    return LayerCheck(point(16, "int4", 128, even, 0.1), dataclasses.replace(candidate, recipe=recipe))


def test_a_base_recipe_that_loses_less_stays() -> None:
    base = point(4, "int4", 512, (0.05, 0.06), 0.4)
    calibration = dataclasses.replace(forged(), base=base)
    assert calibration.found.recipe != base.recipe
    assert calibration.final is base
    assert "It is the base recipe itself: what the rule found" in verdict(calibration, ABOUT)


def test_the_smallest_pair_that_is_as_good_as_the_best_is_chosen_then_the_knee_of_its_curve():
    choice = choose(forged().grid)
    assert [each.pair for each in choice.pairs] == [(16, "int4"), (8, "int4")]
    assert [each.budget for each in choice.curve] == [64, 128, 256]
    assert choice.chosen.name == "16 per cluster, int4, budget 128"
    assert choice.budget_knee.flat


def test_a_smaller_pair_that_is_clearly_worse_is_not_chosen():
    grid = [point(8, "int4", 256, (0.20, 0.20), 0.2), point(16, "int2", 256, (0.50, 0.51), 0.1)]
    assert choose(grid).chosen.pair == (8, "int4")


def test_pairs_of_the_same_bytes_are_told_apart_by_their_loss():
    grid = [point(8, "int4", 256, (0.9, 0.8), 0.2), point(16, "int4", 256, (0.1, 0.2), 0.2)]
    assert choose(grid).chosen.pair == (16, "int4")


def test_budgets_that_recall_everything_choose_the_smallest():
    grid = [dataclasses.replace(point(8, "int4", budget, (0.1, 0.2), 0.2), read=0.5) for budget in (64, 128, 256)]
    assert choose(grid).chosen.budget == 64


def test_layer_budgets_move_recall_to_the_worst_quarter_and_keep_its_sum():
    losses = (0.1, 0.9, 0.3, 0.2, 0.8, 0.4, 0.5, 0.05)
    recipe = Recipe(recall=RecallPolicy(budget=100))
    moved = layer_budgets(recipe, [LayerPoint(index, (loss,)) for index, loss in enumerate(losses)])
    assert moved is not None
    assert dict(moved.recall.layer_budgets) == {"1": 200, "4": 200, "0": 50, "2": 50, "3": 50, "7": 50}
    assert sum(moved.recall.layer_budgets.get(str(layer), 100) for layer in range(8)) == 800


def test_three_layers_have_no_quarter():
    assert layer_budgets(Recipe(), [LayerPoint(index, (0.1,)) for index in range(3)]) is None


def test_layer_budgets_are_kept_for_more_than_one_standard_error():
    # Differences 0.1 and 0.3: mean 0.2, standard error 0.1.
    check = check_of((0.5, 0.8), (0.4, 0.5))
    assert (check.gain, check.error) == (pytest.approx(0.2), pytest.approx(0.1))
    assert check.kept
    assert forged(check).found.recipe.recall.layer_budgets == {"0": 256, "1": 64, "2": 64}


def test_layer_budgets_within_one_standard_error_are_dropped():
    # Differences 0.3 and -0.2: mean 0.05, standard error 0.25.
    check = check_of((0.5, 0.5), (0.2, 0.7))
    assert not check.kept
    assert forged(check).found.recipe.recall.layer_budgets == {}
    assert "were not kept" in verdict(forged(check), ABOUT)


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"budgets": ()}, "budgets"),
        ({"budgets": (64, 64)}, "each once"),
        ({"budgets": (0,)}, "budget is 0"),
        ({"codecs": ("int5",)}, "'int5'"),
        ({"tokens_per_cluster": (0,)}, "tokens_per_cluster is 0"),
    ],
)
def test_a_sweep_refuses_what_no_recipe_allows(values: dict[str, tuple[object, ...]], word: str):
    with pytest.raises(ConfigError, match=word):
        Sweep(Recipe(), **values)


def test_the_base_recipe_is_measured_once():
    assert BASE not in Sweep(Recipe(), (4,), ("int3/int2.5",), (256,)).recipes()
    assert list(Sweep(Recipe(), (8,), ("int3",), (128,)).recipes()) == ["8 per cluster, int3, budget 128", BASE]


def test_the_default_recipe_is_a_point_of_the_default_sweep():
    assert Recipe() in Sweep(Recipe()).recipes().values()


def test_the_verdict_names_choice_default_and_knee():
    text = verdict(forged(), ABOUT)
    assert text.startswith("Chosen: 16 tokens per cluster, int4, a budget of 128 tokens: KL 0.2,")
    assert "The base recipe (8 tokens per cluster, int4, a budget of 256 tokens): KL 0.2," in text
    assert "The two lose alike" in text
    assert "The knee is at a budget of 128" in text


def test_the_verdict_says_where_the_sweep_did_not_reach_the_knee():
    grid = tuple(point(8, "int4", budget, (1.0 - budget / 300,) * 2, 0.2) for budget in (64, 128, 256))
    calibration = Calibration(grid, grid[0], (), choose(grid), (), None)
    assert "More budget still helps at 256" in verdict(calibration, ABOUT)
    assert result_dict(calibration, ABOUT)["more_budget_helps"] is True


def test_the_report_marks_the_knee_and_the_default():
    page = render_report(build_report(forged(), dataclasses.replace(ABOUT, base="default")))
    assert "The knee is at a budget of 128" in page
    assert ">knee</text>" in page
    assert ">default</text>" in page
    assert "<script" not in page


def test_the_table_has_one_row_for_each_configuration():
    rows = list(csv.DictReader(table_text(forged()).splitlines()))
    assert [row["name"] for row in rows] == [each.name for each in forged().grid]
    assert [row["budget"] for row in rows if row["chosen"] == "1"] == ["128"]
    assert [row["budget"] for row in rows if row["base"] == "1"] == ["256"]


def test_the_recipe_file_round_trips_below_its_comments(tmp_path: Path):
    calibration = forged(check_of((0.5, 0.8), (0.4, 0.5)))
    about = dataclasses.replace(ABOUT, archives={"a\nwindow_tokens = 1": 5})
    (tmp_path / "recipe.toml").write_text(recipe_text(calibration, about), encoding="utf-8")
    assert Recipe.from_toml(tmp_path / "recipe.toml") == calibration.recipe


def four_layers() -> LoadedModel:
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=4096,
        initializer_range=0.4,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    return LoadedModel(model=attach(model), tokenizer=tiny_tokenizer(), name="four")


def task(n_questions: int = 3) -> Task:
    items = tuple(Item(question, ()) for question in QUESTIONS[:n_questions])
    return Task(name="harbour", text=DOCUMENT[:1500], questions=Questions(items, None, 4))


def measure(folder: Path, model: LoadedModel, *, seed: int = 0, on_progress: Progress | None = None) -> Calibration:
    sweep = Sweep(BASE_RECIPE, (4, 16), ("int4",), (16, 64))
    settings: dict[str, object] = {"seed": seed}
    return calibrate(model, [task()], sweep, folder, layout=LAYOUT, settings=settings, on_progress=on_progress)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Calibration, LoadedModel]:
    folder, model = tmp_path_factory.mktemp("calibration"), four_layers()
    return folder, measure(folder, model), model


def test_every_configuration_and_layer_is_measured(measured: tuple[Path, Calibration, LoadedModel]):
    _, calibration, _ = measured
    assert [(*each.pair, each.budget) for each in calibration.grid] == [
        (4, "int4", 16),
        (4, "int4", 64),
        (16, "int4", 16),
        (16, "int4", 64),
    ]
    assert all(len(each.losses) == 3 for each in calibration.grid)
    assert calibration.base.recipe == BASE_RECIPE
    assert [each.layer for each in calibration.layers] == [0, 1, 2, 3]
    assert calibration.layer_check is not None


def test_one_layer_alone_loses_less_than_all(measured: tuple[Path, Calibration, LoadedModel]):
    _, calibration, _ = measured
    assert all(0 < sum(each.losses) / 3 < calibration.choice.chosen.loss for each in calibration.layers)


def test_a_run_again_measures_nothing_and_says_the_same(
    measured: tuple[Path, Calibration, LoadedModel], monkeypatch: pytest.MonkeyPatch
):
    folder, calibration, model = measured
    monkeypatch.setattr("ragkv.evaluation.run.timed_prefill", None)
    assert measure(folder, model) == calibration


def test_an_interrupted_run_goes_on_with_what_is_missing(
    measured: tuple[Path, Calibration, LoadedModel], tmp_path: Path
):
    folder, calibration, model = measured
    phases = {path.name: (path / "results.jsonl").read_text() for path in folder.iterdir() if path.is_dir()}
    kept = {phase: "".join(text.splitlines(keepends=True)[:2]) for phase, text in phases.items()}
    for phase, text in kept.items():
        (tmp_path / phase).mkdir()
        shutil.copy(folder / phase / "settings.json", tmp_path / phase)
        (tmp_path / phase / "results.jsonl").write_text(text + phases[phase][len(text) : len(text) + 40])
    again = measure(tmp_path, model)
    assert again.recipe == calibration.recipe
    assert [each.loss for each in again.grid] == pytest.approx([each.loss for each in calibration.grid])
    for phase, text in phases.items():
        found = (tmp_path / phase / "results.jsonl").read_text()
        assert found.startswith(kept[phase])
        assert found.count("\n") == text.count("\n")


def test_other_settings_are_refused(measured: tuple[Path, Calibration, LoadedModel]):
    folder, _, model = measured
    with pytest.raises(ConfigError, match="other settings"):
        measure(folder, model, seed=1)


def test_one_question_is_too_few(tmp_path: Path):
    with pytest.raises(ConfigError, match="at least 2"):
        calibrate(loaded("llama"), [task(1)], Sweep(Recipe()), tmp_path, layout=LAYOUT, settings={})


def test_layers_that_the_base_keeps_dense_do_not_recall(tmp_path: Path):
    base = dataclasses.replace(
        BASE_RECIPE,
        tokens_per_cluster=8,
        value_codec="int3",
        recall=RecallPolicy(budget=16, dense_layers=(0,)),
    )
    sweep = Sweep(base, (8,), ("int3",), (16,))
    calibration = calibrate(loaded("llama"), [task(2)], sweep, tmp_path, layout=LAYOUT, settings={})
    assert [each.layer for each in calibration.layers] == [1, 2]
    assert calibration.recipe.recall.dense_layers == (0,)
    assert calibration.base.name == "8 per cluster, int3, budget 16"


def test_the_four_files_are_written(measured: tuple[Path, Calibration, LoadedModel], tmp_path: Path):
    _, calibration, _ = measured
    result = write_outputs(calibration, ABOUT, tmp_path)
    assert json.loads((tmp_path / "result.json").read_text()) == result
    assert Recipe.from_toml(tmp_path / "recipe.toml") == calibration.recipe
    assert len((tmp_path / "table.csv").read_text().splitlines()) == 6
    assert "Layer by layer" in (tmp_path / "report.html").read_text()


def test_progress_counts_the_answers_of_each_phase(measured: tuple[Path, Calibration, LoadedModel], tmp_path: Path):
    folder, _, model = measured
    (tmp_path / "grid").mkdir()
    shutil.copy(folder / "grid" / "settings.json", tmp_path / "grid")
    lines = (folder / "grid" / "results.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "grid" / "results.jsonl").write_text("".join(lines[:3]))  # dense and two of five configurations
    seen: list[tuple[str, int, int]] = []
    measure(tmp_path, model, on_progress=lambda *step: seen.append(step))
    assert [step for step in seen if step[0] == "grid"] == [("grid", done, 15) for done in range(7, 16)]
    assert ("single layers", 12, 12) in seen
    assert seen[-1] == ("layer budgets", 6, 6)
