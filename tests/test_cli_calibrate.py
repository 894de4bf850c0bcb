"""``ragkv calibrate`` as a user types it, on a tiny model in a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from ragkv import Recipe
from ragkv.archive.manifest import read_manifest
from ragkv.cli.app import app
from ragkv.cli.calibrate import calibrate
from tests.archives import DOCUMENT
from tests.tiny import tiny_model, tiny_tokenizer

SMALL_SWEEP = ("--tokens-per-cluster", 4, "--tokens-per-cluster", 8, "--codec", "int4", "--budget", 16, "--budget", 64)

alone = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
alone.command()(calibrate)


def run(program: typer.Typer, *words: object) -> tuple[int, str, str]:
    """Exit code, stdout, and stderr with the error that the console entry point would show."""
    result = CliRunner().invoke(program, [str(word) for word in words], prog_name="ragkv", env={"COLUMNS": "200"})
    fault = "" if result.exception is None else str(result.exception)
    return result.exit_code, result.stdout, result.stderr + fault


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a saved tiny model and the archive of a document."""
    folder = tmp_path_factory.mktemp("workplace")
    tiny_model("llama").save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    (folder / "harbour.txt").write_text(DOCUMENT[:2000], encoding="utf-8")
    words = ("build", folder / "harbour.txt", "--model", folder / "model", "--out", folder / "indexes")
    code, _, fault = run(app, *words)
    assert code == 0, fault
    return folder


@pytest.fixture(scope="module")
def calibrated(workplace: Path) -> tuple[Path, dict[str, object]]:
    """The folder of a run on own questions, and what it printed."""
    folder = workplace / "calibration"
    words = ("--archive", workplace / "indexes" / "harbour", "--out", folder, *SMALL_SWEEP)
    code, shown, fault = run(alone, *words, "--n-questions", 4, "--max-new-tokens", 4, "--json")
    assert code == 0, fault
    assert "5 configurations x 4 questions, 12 answers with one layer recalled alone: 32 answers" in fault
    return folder, json.loads(shown)


def test_json_is_what_the_result_file_holds_and_where_the_files_are(calibrated: tuple[Path, dict[str, object]]):
    folder, shown = calibrated
    files = shown.pop("files")
    assert json.loads((folder / "result.json").read_text()) == shown
    assert isinstance(files, dict)
    assert [Path(path).is_file() for path in files.values()] == [True] * 4


def test_the_report_says_what_was_chosen_and_what_was_asked(calibrated: tuple[Path, dict[str, object]]):
    folder, shown = calibrated
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "Chosen: " in page
    assert "knee" in page
    assert "invented fact" in page
    assert shown["recipe"] == Recipe.from_toml(folder / "recipe.toml").to_dict()


def test_the_recipe_builds_an_archive_that_recalls_as_calibrated(
    workplace: Path, calibrated: tuple[Path, dict[str, object]], tmp_path: Path
):
    folder, _ = calibrated
    common = ("--recipe", folder / "recipe.toml")
    code, _, fault = run(
        app, "build", workplace / "harbour.txt", "--model", workplace / "model", "--out", tmp_path, *common
    )
    assert code == 0, fault
    assert read_manifest(tmp_path / "harbour").recipe == Recipe.from_toml(folder / "recipe.toml")
    asked = ("ask", "Who?", "--archive", workplace / "indexes" / "harbour", "--max-new-tokens", 2)
    code, _, fault = run(app, *asked, *common)
    assert code == 0, fault


def test_a_second_run_goes_on_without_measuring(workplace: Path, calibrated: tuple[Path, dict[str, object]]):
    folder, shown = calibrated
    before = (folder / "grid" / "results.jsonl").stat().st_mtime_ns
    words = ("--archive", workplace / "indexes" / "harbour", "--out", folder, *SMALL_SWEEP)
    code, text, fault = run(alone, *words, "--n-questions", 4, "--max-new-tokens", 4)
    assert code == 0, fault
    assert str(shown["verdict"]) in text
    assert (folder / "grid" / "results.jsonl").stat().st_mtime_ns == before


def test_questions_with_gold_answers_give_a_task_score(workplace: Path, tmp_path: Path):
    lines = [{"question": "Who kept the book?", "answers": ["Agnes Moore"]}, {"question": "How many cranes?"}]
    (tmp_path / "asked.jsonl").write_text("\n".join(map(json.dumps, lines)))
    words = ("--archive", workplace / "indexes" / "harbour", "--out", tmp_path / "out", "--max-new-tokens", 3)
    sweep = ("--tokens-per-cluster", 8, "--codec", "int3", "--budget", 256)
    code, shown, fault = run(alone, *words, *sweep, "--questions", tmp_path / "asked.jsonl", "--json")
    assert code == 0, fault
    result = json.loads(shown)
    assert result["metric"] == "squad"
    assert result["dense_score"] is not None
    assert "is the default recipe itself" in result["verdict"]


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (("--archive", "nowhere"), "no archive in 'nowhere'"),
        (("--codec", "int5"), "'int5'"),
        (("--budget", 0), "budget is 0"),
        (("--budget", 8, "--budget", 8), "each once"),
        (("--task", "chess"), "task is 'chess'"),
        (("--task", "qa"), "give --questions"),
        (("--questions", "empty.txt"), "holds no questions"),
        (("--questions", "wrong.jsonl"), "line 2"),
        (("--n-questions", 1), "at least 2"),
        (("--out", "used"), "choose another --out"),
    ],
)
def test_a_mistake_is_told_before_the_model_is_loaded(
    workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[object, ...], fault: str
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "wrong.jsonl").write_text('{"question": "a"}\n{"ask": "b"}\n')
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "letter.txt").write_text("Dear sir,")
    common = ["--archive", workplace / "indexes" / "harbour"] if "--archive" not in words else []
    place = [] if "--out" in words else ["--out", "fresh"]
    code, _, shown = run(alone, *common, *place, "--model", "no-such-model-anywhere", *words)
    assert code != 0
    assert fault in shown
    assert not (tmp_path / "fresh").exists()


def test_a_model_that_did_not_build_the_archive_leaves_no_folder_behind(workplace: Path, tmp_path: Path):
    tiny_model("llama", seed=1).save_pretrained(tmp_path / "other")
    tiny_tokenizer().save_pretrained(tmp_path / "other")
    common = (
        "--archive",
        workplace / "indexes" / "harbour",
        "--model",
        tmp_path / "other",
        "--out",
        tmp_path / "fresh",
    )
    code, _, fault = run(alone, *common)
    assert code != 0
    assert "built with another model" in fault
    assert not (tmp_path / "fresh").exists()


def test_a_folder_of_another_sweep_is_refused(workplace: Path, calibrated: tuple[Path, dict[str, object]]):
    folder, _ = calibrated
    code, _, fault = run(alone, "--archive", workplace / "indexes" / "harbour", "--out", folder, "--quick")
    assert code != 0
    assert "other settings" in fault


def test_quick_tries_less_and_what_is_given_by_itself_counts(workplace: Path, tmp_path: Path):
    common = ("--archive", workplace / "indexes" / "harbour", "--model", "no-such-model", "--quick")
    assert "6 configurations x 12 questions" in run(alone, *common, "--out", tmp_path / "a")[2]
    given = ("--budget", 64, "--budget", 512, "--n-questions", 8)
    assert "5 configurations x 8 questions" in run(alone, *common, *given, "--out", tmp_path / "b")[2]
