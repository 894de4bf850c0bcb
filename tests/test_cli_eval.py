"""``ragkv eval`` on a tiny model and forged data: what it writes, going on after a stop, refusals, the report."""

from __future__ import annotations

import json
import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from transformers import DynamicCache
from typer.testing import CliRunner

import ragkv.cli.eval
from ragkv.cli.eval import evaluate
from ragkv.errors import ConfigError
from ragkv.evaluation.compare import answer_distance
from ragkv.evaluation.data.suite import Item
from ragkv.evaluation.plan import FORCED_TOKENS, SHORT_TOKENS, EvalOptions, plan_subjects, plan_tasks
from ragkv.evaluation.results import ResultsFolder
from ragkv.evaluation.run import Measured
from ragkv.evaluation.subjects import DenseDocument
from ragkv.model.prompt import PromptLayout, tokenize_prompt
from ragkv.model.shape import model_shape
from ragkv.recipe import RecallPolicy, Recipe
from tests.archives import loaded
from tests.tiny import tiny_config, tiny_model, tiny_tokenizer

TOKENS = 1100
SUBJECTS = ["dense", "ragkv", "ragkv, codes only", "ragkv, clusters only", "window-sinks", "quantised-4"]

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
app.command("eval")(evaluate)


def squad() -> str:
    paragraphs = []
    for number in range(60):
        text = f"On day {number} the keeper Agnes Moore wrote {number * 7 % 31} ships in the green book of the harbour."
        answer = {"text": "Agnes Moore", "answer_start": text.index("Agnes Moore")}
        paragraphs.append({"context": text, "qas": [{"question": f"Who wrote on day {number}?", "answers": [answer]}]})
    return json.dumps({"data": [{"paragraphs": paragraphs}]})


def squality(n_stories: int) -> str:
    lines = []
    for story in range(n_stories):
        days = [f"In year {story} on day {day} the tide rose {day * 7 % 31} feet in the north." for day in range(30)]
        responses = [{"response_text": "The tide rose in the north."}]
        questions = [{"question_text": "Plot?", "responses": responses}]
        lines.append(json.dumps({"document": "\n\n".join(days), "questions": questions}))
    return "\n".join(lines)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a saved tiny model, data files and recipes."""
    folder = tmp_path_factory.mktemp("place")
    tiny_model("llama").save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    (folder / "data").mkdir()
    (folder / "data" / "xquad.en.json").write_text(squad(), encoding="utf-8")
    (folder / "data" / "squality_dev10.jsonl").write_text(squality(3), encoding="utf-8")
    (folder / "fine.toml").write_text('key_codec = "int8"\nvalue_codec = "int8"\n', encoding="utf-8")
    return folder


def words(place: Path, out: str, *more: object, suite: str = "xquad-en") -> list[str]:
    usual = ("--model", place / "model", "--data", place / "data", "--suite", suite, "--out", place / out)
    small = ("--tokens", TOKENS, "--documents", 2, "--items", 2, "--max-new-tokens", 4, "--layout", "plain")
    return [str(word) for word in (*usual, *small, *more)]


def run(*given: str) -> str:
    result = CliRunner().invoke(app, list(given), catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def full(place: Path) -> Path:
    """Results of one run of two suites with steps, layers and two peers, and what it printed."""
    extras = ("--suite", "perplexity", "--steps", "--layers", "--peers", "window-sinks,quantised-4", "--json")
    shown = run(*words(place, "full", *extras))
    (place / "full.json").write_text(shown, encoding="utf-8")
    return place / "full"


def result_of(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "result.json").read_text(encoding="utf-8"))
    return found


def lines_of(out: Path) -> list[str]:
    return (out / "results.jsonl").read_text(encoding="utf-8").splitlines()


def group_of(result: dict[str, Any], name: str) -> dict[str, dict[str, Any]]:
    (group,) = (group for group in result["groups"] if group["group"] == name)
    return {subject["subject"]: subject for subject in group["subjects"]}


def test_one_object_is_printed_and_is_the_file(place: Path, full: Path) -> None:
    assert json.loads((place / "full.json").read_text(encoding="utf-8")) == result_of(full)


def test_the_result_has_every_subject_in_every_group(full: Path) -> None:
    result = result_of(full)
    assert set(result) == {
        "model",
        "settings",
        "environment",
        "subjects",
        "groups",
        "frontiers",
        "layers",
    }
    assert [group["group"] for group in result["groups"]] == ["xquad-en", "short", "long"]
    for group in result["groups"]:
        assert [subject["subject"] for subject in group["subjects"]] == SUBJECTS
        assert group["n_documents"] == 2
        assert group["most_tokens"] <= TOKENS
    assert result["settings"]["recipes"]["ragkv"] == Recipe().to_dict()
    figures = [(frontier["quality"], frontier["cost"]) for frontier in result["frontiers"]]
    assert figures == [("kl", "read"), ("kl", "resident"), ("kl", "disk"), ("f1", "read")]


def test_dense_is_its_own_reference(full: Path) -> None:
    dense = group_of(result_of(full), "xquad-en")["dense"]
    assert dense["answers"]["kl"]["mean"] == 0
    assert dense["answers"]["same_answer"]["value"] == 1
    assert dense["answers"]["scores"]["f1"]["difference"]["value"] == 0
    assert dense["ttft"]["median_over_dense"] == 1
    assert dense["bytes"]["disk_over_dense"] == 1


def test_steps_take_the_archive_apart(full: Path) -> None:
    found = group_of(result_of(full), "xquad-en")
    both, codes, clusters = (found[name]["bytes"] for name in SUBJECTS[1:4])
    assert codes["disk"] == both["disk"] < clusters["disk"]
    assert codes["read_over_dense"] == pytest.approx(1)
    assert both["read"] < codes["read"]
    assert all(found[name]["answers"]["kl"]["mean"] > 0 for name in SUBJECTS[1:4])


def test_peers_have_no_times(full: Path) -> None:
    found = group_of(result_of(full), "xquad-en")
    assert [name for name in SUBJECTS if found[name]["ttft"] is None] == SUBJECTS[4:]


def test_layers_are_measured_on_their_own(full: Path) -> None:
    rows = result_of(full)["layers"]["ragkv"]
    assert [row["layer"] for row in rows] == [0, 1, 2]
    assert all(0 <= row["attention_recall"] <= 1 and row["output_error"] > 0 for row in rows)


class Page(HTMLParser):
    """Checks that tags close in order, and collects the text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.n_figures = 0
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.n_figures += tag == "svg"
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_report_is_well_formed_and_names_every_subject(full: Path) -> None:
    html = (full / "report.html").read_text(encoding="utf-8")
    page = Page(html)
    assert not page.open
    assert page.n_figures == 5
    for name in (*SUBJECTS, "sum of the steps", "Layer by layer", "Perplexity", "torch_threads"):
        assert name in page.text
    assert "http" not in html.replace("http-equiv", "")


def test_the_verdict_says_what_the_figures_say(full: Path) -> None:
    text = Page((full / "report.html").read_text(encoding="utf-8")).text
    mine = group_of(result_of(full), "xquad-en")["ragkv"]
    assert f"with KL {mine['answers']['kl']['mean']:.4f}" in text
    assert f"{mine['bytes']['disk_over_dense']:.3f}x on disk" in text
    assert "comparisons with other policies" in text


def test_the_same_command_measures_nothing_twice(place: Path, full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("measured again")

    before = result_of(full)
    monkeypatch.setattr(ResultsFolder, "add", refuse)
    run(*words(place, "full", "--suite", "perplexity", "--steps", "--layers", "--peers", "window-sinks,quantised-4"))
    assert result_of(full)["groups"] == before["groups"]
    assert result_of(full)["layers"] == before["layers"]


def test_a_run_stopped_after_the_first_document_goes_on(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep, given = ResultsFolder.add, words(place, "stopped")

    def stop_at_the_third(self: ResultsFolder[Measured], measured: Any) -> None:
        if len(self.read()) == 2:
            raise KeyboardInterrupt
        keep(self, measured)

    with monkeypatch.context() as patch:
        patch.setattr(ResultsFolder, "add", stop_at_the_third)
        CliRunner().invoke(app, given)
    first = lines_of(place / "stopped")
    assert len(first) == 2
    assert not (place / "stopped" / "result.json").exists()
    run(*given)
    lines = lines_of(place / "stopped")
    assert lines[:2] == first
    assert len({(json.loads(line)["document"], json.loads(line)["subject"]) for line in lines}) == len(lines) == 4
    assert result_of(place / "stopped")["groups"][0]["n_documents"] == 2


def test_perplexity_is_that_of_a_plain_pass(full: Path) -> None:
    model, layout = loaded("llama"), PromptLayout.plain()
    options = EvalOptions(data=full.parent / "data", suites=("perplexity",), documents=2, tokens=TOKENS)
    expected: dict[str, list[float]] = {"short": [], "long": []}
    for task in plan_tasks(options, model.tokenizer, layout):
        tokens = tokenize_prompt(model.tokenizer, layout, task.text)
        context = [*tokens.prefix_ids, *tokens.document_ids]
        forced = model.tokenizer(task.continuation, add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            logits = model.model(torch.tensor([context + forced])).logits[0, len(context) : -1]
        expected[task.group] += torch.nn.functional.cross_entropy(logits, torch.tensor(forced[1:]), reduction="none")
    for group, nll in expected.items():
        found = group_of(result_of(full), group)["dense"]["perplexity"]
        assert found["value"] == pytest.approx(math.exp(sum(map(float, nll)) / len(nll)), rel=1e-3)
        assert found["ratio"] == 1


def test_short_and_long_documents_have_their_lengths(place: Path) -> None:
    tokenizer, layout = tiny_tokenizer(), PromptLayout.plain()
    options = EvalOptions(data=place / "data", suites=("perplexity",), documents=2, tokens=TOKENS)
    tasks = plan_tasks(options, tokenizer, layout)
    assert [task.group for task in tasks] == ["short", "short", "long", "long"]
    for task in tasks:
        tokens = tokenize_prompt(tokenizer, layout, task.text)
        n_context = len(tokens.prefix_ids) + len(tokens.document_ids)
        assert n_context == (SHORT_TOKENS if task.group == "short" else TOKENS - FORCED_TOKENS)
        assert len(tokenizer(task.continuation)["input_ids"]) == pytest.approx(FORCED_TOKENS, abs=2)
    assert "year 1" in tasks[1].text[:20]


def test_recipes_are_named_by_their_files(place: Path) -> None:
    run(*words(place, "recipes", "--recipe", place / "fine.toml", "--recipe", "default"))
    found = group_of(result_of(place / "recipes"), "xquad-en")
    assert list(found) == ["dense", "fine", "ragkv"]
    assert found["fine"]["bytes"]["disk"] > found["ragkv"]["bytes"]["disk"]


def planned(place: Path, **options: Any) -> list[str]:
    shape = model_shape(tiny_config("llama"))
    return [each.name for each in plan_subjects(EvalOptions(data=place, suites=("kv75",), **options), shape)]


def test_a_sweep_covers_every_recipe_and_every_budgeted_peer(place: Path) -> None:
    names = planned(place, budgets=(64, 256), peers=("pages-minmax", "quantised-8"))
    assert names == ["ragkv@64", "ragkv@256", "pages-minmax@64", "pages-minmax@256", "quantised-8"]


def test_peers_get_the_budget_of_the_recipe_where_none_is_given(place: Path) -> None:
    recipes = {"mine": Recipe(recall=RecallPolicy(budget=96))}
    options = EvalOptions(data=place, suites=("kv75",), recipes=recipes, peers=("eviction",))
    peer = plan_subjects(options, model_shape(tiny_config("llama")))[-1].spec.peer
    assert peer is not None
    assert peer.budget == 96


def test_steps_are_taken_at_the_budget_of_the_recipe_where_it_is_swept(place: Path) -> None:
    options = EvalOptions(data=place, suites=("kv75",), budgets=(64, 256, 512), steps=True)
    contenders = plan_subjects(options, model_shape(tiny_config("llama")))
    assert [each.name for each in contenders if each.usual] == ["ragkv@256"]
    clusters = next(each.spec for each in contenders if each.name == "ragkv, clusters only")
    assert clusters.policy is not None
    assert clusters.policy.budget == 256
    assert clusters.recipe is not None
    assert clusters.recipe.codecs(0) == ("lossless", "lossless")


def test_a_lossless_recipe_has_no_steps(place: Path) -> None:
    recipes = {"exact": Recipe(key_codec="lossless", value_codec="lossless")}
    assert planned(place, recipes=recipes, steps=True) == ["exact"]


def test_the_distance_of_an_answer_is_in_document_tokens_behind_it() -> None:
    model, text = loaded("llama"), "The green book. Then nothing more."
    tokens = tokenize_prompt(model.tokenizer, PromptLayout.plain(), text)
    document = DenseDocument(tokens=tokens, layout=PromptLayout.plain(), dense=DynamicCache(), sha256="")
    behind = sum(start >= 14 for start, _ in tokens.offsets)
    assert answer_distance(document, Item("Which?", ("green book",), ((4, 14),))) == behind > 1
    assert answer_distance(document, Item("What?", ("more",), ((4, 14), (29, len(text))))) == 0
    assert answer_distance(document, Item("Who?", ("nobody",))) is None


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        pytest.param(("--data", "nowhere"), "data folder 'nowhere' does not exist", id="missing folder"),
        pytest.param(("--suite", "squad"), "no suite 'squad'; take of xquad-en, xquad-zh", id="unknown suite"),
        pytest.param(("--peers", "magic"), "no peer 'magic'; take of clusters-drop", id="unknown peer"),
        pytest.param(("--tokens", "5000"), "tokens is 5000 and the model's context is 4096", id="beyond the context"),
        pytest.param(("--budget", "0"), "budget is 0; give at least 1", id="no budget"),
        pytest.param(("--budget", "8", "--budget", "8"), "a budget is given twice", id="budget twice"),
        pytest.param(("--suite", "xquad-en"), "a suite is given twice", id="suite twice"),
        pytest.param(("--recipe", "none.toml"), "recipe file 'none.toml' cannot be read", id="no recipe"),
        pytest.param(("--recipe", "default", "--recipe", "default"), "two recipes are named 'ragkv'", id="same names"),
        pytest.param(("--suite", "perplexity", "--tokens", "1024"), "so give more", id="nothing long"),
        pytest.param(("--layout", "odd"), "give auto, plain, chat or a .toml file", id="layout"),
    ],
)
def test_mistakes_are_one_sentence_before_the_model_is_loaded(
    place: Path, given: tuple[str, ...], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(ragkv.cli.eval, "load", refuse)
    result = CliRunner().invoke(app, words(place, "never", *given))
    assert isinstance(result.exception, ConfigError)
    assert fault in str(result.exception)
    assert not (place / "never").exists()


@pytest.mark.parametrize("kind", ["other results", "something else"])
def test_a_folder_in_use_is_refused_before_the_model_is_loaded(
    place: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ragkv.cli.eval, "load", None)
    name, text = ("settings.json", "{}") if kind == "other results" else ("letter.txt", "Dear all")
    (tmp_path / name).write_text(text, encoding="utf-8")
    result = CliRunner().invoke(app, [*words(place, "never"), "--out", str(tmp_path)])
    assert isinstance(result.exception, ConfigError)
    assert "choose another --out" in str(result.exception)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_layers_need_questions(place: Path) -> None:
    result = CliRunner().invoke(app, words(place, "never", "--layers", suite="perplexity"))
    assert "add a suite other than perplexity" in str(result.exception)


def test_the_help_teaches_by_example() -> None:
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "120"}).stdout
    assert "ragkv eval --model demo --data data --suite xquad-en --out results" in shown
