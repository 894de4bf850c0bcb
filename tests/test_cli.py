"""The commands as a user types them, on a tiny model in a folder."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ragkv import Archive, load_model
from ragkv.cli import app as entry
from ragkv.cli.app import app
from tests.archives import DOCUMENT
from tests.cli_docs import COMMANDS, PAGE, render
from tests.tiny import tiny_model, tiny_tokenizer

ASK_KEYS = {
    "answer",
    "archive_tokens",
    "clusters",
    "evidence",
    "kv_bytes",
    "layers",
    "mode",
    "prefilled_tokens",
    "recalled_tokens",
    "token_ids",
    "tpot_s",
    "ttft_s",
    "unrecalled_mass",
}
RATIOS = {
    "build_over_prefill",
    "cold_over_warm",
    "disk_over_dense",
    "open_over_zero",
    "resident_over_dense",
    "tpot_archive_over_dense",
    "tpot_archive_over_zero",
    "ttft_archive_over_zero",
    "ttft_dense_over_archive",
}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a saved tiny model and two documents."""
    folder = tmp_path_factory.mktemp("workplace")
    tiny_model("llama").save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    (folder / "harbour.txt").write_text(DOCUMENT, encoding="utf-8")
    (folder / "ferry.txt").write_text(DOCUMENT[:700], encoding="utf-8")
    (folder / "empty.txt").write_text("", encoding="utf-8")
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    return folder


def run(*words: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `ragkv WORDS`, errors handled as the console entry point does."""
    result = CliRunner().invoke(app, [str(word) for word in words], prog_name="ragkv")
    return result.exit_code, result.stdout, result.stderr if result.exception is None else str(result.exception)


@pytest.fixture(scope="module")
def lossless(workplace: Path) -> Path:
    (workplace / "lossless.toml").write_text('key_codec = "lossless"\nvalue_codec = "lossless"\n', encoding="utf-8")
    words = ("build", workplace / "harbour.txt", "--model", workplace / "model", "--out", workplace / "lossless")
    code, _, fault = run(*words, "--recipe", workplace / "lossless.toml")
    assert code == 0, fault
    return workplace / "lossless" / "harbour"


@pytest.fixture(scope="module")
def archive(workplace: Path) -> Path:
    code, _, fault = run("build", workplace / "harbour.txt", "--model", workplace / "model", "--out", workplace / "out")
    assert code == 0, fault
    return workplace / "out" / "harbour"


def test_build_makes_an_archive_named_after_the_file(workplace: Path, archive: Path) -> None:
    opened = Archive.open(archive, load_model(str(workplace / "model")))
    assert opened.manifest.document_name == str(workplace / "harbour.txt")


def test_build_again_leaves_what_is_up_to_date(workplace: Path, archive: Path) -> None:
    before = (archive / "manifest.json").stat().st_mtime_ns
    code, shown, _ = run(
        "build", workplace / "harbour.txt", "--model", workplace / "model", "--out", workplace / "out", "--json"
    )
    assert code == 0
    assert json.loads(shown)["archives"][0]["built"] is False
    assert (archive / "manifest.json").stat().st_mtime_ns == before


def test_another_recipe_is_built_anew(workplace: Path, tmp_path: Path) -> None:
    common = ("build", workplace / "ferry.txt", "--model", workplace / "model", "--out", tmp_path, "--json")
    run(*common)
    _, shown, _ = run(*common, "--tokens-per-cluster", 3)
    row = json.loads(shown)["archives"][0]
    assert row["built"] is True
    assert json.loads((tmp_path / "ferry" / "manifest.json").read_text())["recipe"]["tokens_per_cluster"] == 3


def test_a_document_that_fails_does_not_stop_the_others(workplace: Path, tmp_path: Path) -> None:
    files = [workplace / "empty.txt", workplace / "ferry.txt"]
    code, shown, _ = run("build", *files, "--model", workplace / "model", "--out", tmp_path, "--json")
    account = json.loads(shown)
    assert code == 2
    assert [row["built"] for row in account["archives"]] == [True]
    assert "empty" in account["failed"][0]["error"]


def test_ask_prints_one_json_object_with_the_promised_keys(archive: Path) -> None:
    code, shown, _ = run("ask", "Who kept the book?", "--archive", archive, "--max-new-tokens", 6, "--json")
    assert code == 0
    answer = json.loads(shown)
    assert set(answer) == ASK_KEYS
    assert set(answer["kv_bytes"]) == {"dense", "resident", "archive"}


def test_ask_prefills_the_question_only_and_dense_everything(archive: Path) -> None:
    words = ("ask", "Who kept the book?", "--archive", archive, "--max-new-tokens", 4, "--json")
    recall = json.loads(run(*words)[1])
    dense = json.loads(run(*words, "--mode", "dense")[1])
    assert dense["prefilled_tokens"] == recall["archive_tokens"] + recall["prefilled_tokens"]
    assert recall["prefilled_tokens"] < 40


def test_everything_recalled_gives_the_dense_answer(lossless: Path) -> None:
    words = ("ask", "Who kept the book?", "--archive", lossless, "--max-new-tokens", 12, "--json")
    recall = json.loads(run(*words, "--budget", 100_000)[1])
    dense = json.loads(run(*words, "--mode", "dense")[1])
    assert recall["token_ids"] == dense["token_ids"]


def test_streamed_answer_is_the_whole_answer(archive: Path) -> None:
    words = ("ask", "Who kept the book?", "--archive", archive, "--max-new-tokens", 12)
    whole = json.loads(run(*words, "--json")[1])["answer"]
    assert run(*words, "--stream")[1].startswith(whole)


@pytest.mark.timeout(300)
def test_several_archives_are_asked_together(archive: Path, lossless: Path) -> None:
    words = ("ask", "Who kept the book?", "--json", "--max-new-tokens", 4)
    one = json.loads(run(*words, "--archive", archive)[1])
    two = json.loads(run(*words, "--archive", archive, "--archive", lossless)[1])
    prefix = Archive.open(
        archive, load_model(json.loads(run("inspect", archive, "--json")[1])["model"]["name"])
    ).prefix_tokens
    assert two["archive_tokens"] == 2 * one["archive_tokens"] - prefix
    assert two["prefilled_tokens"] == one["prefilled_tokens"]


@pytest.mark.parametrize("option", [("--positions", "reused"), ("--temperature", 0.9, "--scale", 0.9)])
def test_archives_are_put_together_as_the_options_say(
    archive: Path, lossless: Path, option: tuple[object, ...]
) -> None:
    code, shown, _ = run("ask", "Who?", "--archive", archive, "--archive", lossless, *option, "--json")
    assert code == 0
    assert json.loads(shown)["mode"] == "recall"


def test_documents_of_a_catalog_are_asked_by_name_or_all_together(workplace: Path, tmp_path: Path) -> None:
    catalog = tmp_path / "catalog"
    run("catalog", "add", catalog, workplace / "harbour.txt", workplace / "ferry.txt", "--model", workplace / "model")
    words = ("ask", "Who kept the book?", "--catalog", catalog, "--json", "--max-new-tokens", 4)
    one, every = json.loads(run(*words, "--document", "ferry.txt")[1]), json.loads(run(*words)[1])
    both = json.loads(run(*words, "--document", "ferry.txt", "--document", "harbour.txt")[1])
    assert one["archive_tokens"] < every["archive_tokens"] == both["archive_tokens"]
    code, _, fault = run(*words, "--document", "nowhere.txt")
    assert code != 0
    assert "nowhere.txt" in fault


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "give --archive"),
        (("--archive", "a", "--catalog", "b"), "give --archive"),
        (("--archive", "a", "--document", "b"), "give --catalog"),
        (("--catalog", "nowhere"), "nowhere"),
    ],
)
def test_what_is_asked_must_be_named_in_one_way(words: tuple[str, ...], said: str) -> None:
    code, _, fault = run("ask", "Who?", *words)
    assert code != 0
    assert said in fault


def test_a_report_is_a_page_with_question_answer_and_passages(archive: Path, tmp_path: Path) -> None:
    page = tmp_path / "answer.html"
    code, shown, _ = run("ask", "Who kept <the> book?", "--archive", archive, "--report", page)
    assert code == 0
    html = page.read_text(encoding="utf-8")
    assert "Who kept &lt;the&gt; book?" in html
    assert "harbour" in html
    assert str(page) in " ".join(shown.split())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--mode", "dense", "--report", "page.html"), "--report shows what was recalled"),
        (("--report", "."), "give the name of a file"),
        (("--report", "nowhere/page.html"), "a folder that exists"),
        (("--recompute", -1), "--recompute is -1"),
        (("--recompute", 500), "sink_tokens"),
        (("--positions", "sideways"), "consecutive, reused"),
        (("--scale", 0), "give a number from 0.01"),
    ],
)
def test_options_that_cannot_be_used_are_one_sentence(
    archive: Path, lossless: Path, options: tuple[object, ...], said: str
) -> None:
    code, _, fault = run("ask", "Who?", "--archive", archive, "--archive", lossless, *options)
    assert code != 0
    assert said in fault


def test_bench_prints_the_promised_ratios(workplace: Path) -> None:
    (workplace / "questions.txt").write_text("Who kept the book?\nHow many cranes?\n", encoding="utf-8")
    code, shown, fault = run(
        *("bench", "--model", workplace / "model", "--tokens", 400, "--tokens", 600, "--steps", 3, "--json"),
        *("--text", workplace / "harbour.txt", "--questions", workplace / "questions.txt"),
    )
    assert code == 0, fault
    runs = json.loads(shown)["runs"]
    assert [row["tokens"] for row in runs] == [400, 600]
    for row in runs:
        assert set(row["ratios"]) == RATIOS
        assert row["fidelity"]["kl"] >= 0
        assert 0 <= row["fidelity"]["top1"] <= 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("ask", "Who?", "--archive", "nowhere"), "no archive in 'nowhere'"),
        (("ask", " ", "--archive", "nowhere"), "the question is empty"),
        (("ask", "Who?", "--archive", "nowhere", "--budget", 0), "budget is 0"),
        (("ask", "Who?", "--archive", "nowhere", "--mode", "fast"), "mode is 'fast'"),
        (("ask", "Who?", "--archive", "nowhere", "--json", "--stream"), "leave out --stream"),
        (("build", "nowhere.txt", "--model", "demo"), "'nowhere.txt' cannot be read"),
        (("build", "a/x.txt", "b/x.md", "--model", "demo"), "would both become"),
        (("bench", "--model", "demo", "--text", "nowhere.txt"), "'nowhere.txt' cannot be read"),
    ],
)
def test_wrong_input_is_one_sentence_before_the_model_is_loaded(words: tuple[object, ...], said: str) -> None:
    code, shown, fault = run(*words)
    assert code != 0
    assert not shown
    assert said in fault
    assert "\n" not in fault


def test_a_file_that_is_not_utf8_is_named(workplace: Path) -> None:
    _, _, fault = run("build", workplace / "latin.txt", "--model", workplace / "model")
    assert "not UTF-8 text (byte 3)" in fault


def test_the_folder_of_several_archives_names_them(workplace: Path, archive: Path) -> None:
    _, _, fault = run("ask", "Who?", "--archive", archive.parent)
    assert "harbour" in fault
    assert "name one of them" in fault


def test_the_console_entry_point_turns_an_error_into_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["ragkv", "ask", "Who?", "--archive", "nowhere"])
    with pytest.raises(SystemExit) as stopped:
        entry.main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("error: no archive in 'nowhere'")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_teaches_with_an_example(command: str) -> None:
    code, shown, _ = run(command, "--help")
    assert code == 0
    assert f"ragkv {command} " in shown.split("Example", 1)[1]


def test_the_documentation_shows_the_help_as_it_is() -> None:
    assert PAGE.read_text(encoding="utf-8") == render()


def test_a_request_to_terminate_unwinds_so_that_temporary_folders_go(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[str] = []

    def work(prog_name: str) -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            left.append(prog_name)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(entry, "app", work)
    with pytest.raises(SystemExit) as stopped:
        entry.main()
    assert (stopped.value.code, left) == (143, ["ragkv"])
    assert signal.getsignal(signal.SIGTERM) is before
