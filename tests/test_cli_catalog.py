"""``ragkv catalog`` as a user types it, on a tiny model in a folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ragkv.catalog.catalog import Catalog
from ragkv.cli.app import app
from tests.archives import SMALL
from tests.cli_docs import CATALOG_COMMANDS
from tests.tiny import TEXT, tiny_model, tiny_tokenizer


def run(*words: object) -> tuple[int, str, str]:
    """Exit code, stdout, and stderr with the error that the console entry point would show."""
    command = ["catalog", *(str(word) for word in words)]
    result = CliRunner().invoke(app, command, prog_name="ragkv", env={"COLUMNS": "200"})
    fault = "" if result.exception is None else str(result.exception)
    return result.exit_code, result.stdout, result.stderr + fault


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a saved tiny model, a recipe, texts, and a catalog of two of them; do not change it."""
    folder = tmp_path_factory.mktemp("workplace")
    tiny_model("llama").save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    (folder / "small.toml").write_text(SMALL.to_toml(), encoding="utf-8")
    for boat in ("barge", "cutter", "dinghy"):
        (folder / f"{boat}.txt").write_text(TEXT.replace("ferry", boat), encoding="utf-8")
    (folder / "empty.txt").touch()
    words = ("add", folder / "c", folder / "barge.txt", folder / "cutter.txt", "--model", folder / "model")
    code, shown, fault = run(*words, "--recipe", folder / "small.toml")
    assert code == 0, fault
    lines = shown.splitlines()
    assert [line.split()[1] for line in lines] == [f"{folder / name}.txt:" for name in ("barge", "cutter")]
    assert all(line.endswith("KiB, built") for line in lines)
    return folder


@pytest.fixture
def folder(workplace: Path, tmp_path: Path) -> Path:
    """A copy of the catalog."""
    return shutil.copytree(workplace / "c", tmp_path / "c")


def ids(folder: Path) -> dict[str, str]:
    """Ids by the last part of the name."""
    return {Path(entry.name).name: entry.id for entry in Catalog.open(folder).entries()}


def test_what_is_there_is_said_and_the_model_is_the_catalogs(workplace: Path, folder: Path) -> None:
    code, shown, fault = run("add", folder, workplace / "barge.txt", workplace / "dinghy.txt")
    assert code == 0, fault
    first, second = shown.splitlines()
    assert first.startswith(f"{ids(folder)['barge.txt'][:12]}  {workplace / 'barge.txt'}: ")
    assert first.endswith("already there")
    assert second.endswith("built")


def test_add_writes_one_json_object_and_goes_on_after_a_document_that_fails(workplace: Path, folder: Path) -> None:
    code, shown, fault = run("add", folder, workplace / "empty.txt", workplace / "dinghy.txt", "--json")
    account = json.loads(shown)
    entry = Catalog.open(folder).entry("dinghy.txt")
    assert code == 2
    assert account["documents"] == [
        {
            "file": str(workplace / "dinghy.txt"),
            "id": entry.id,
            "name": str(workplace / "dinghy.txt"),
            "tokens": entry.tokens,
            "bytes": entry.bytes,
            "built": True,
            "replaced": [],
        }
    ]
    assert [fault["file"] for fault in account["failed"]] == [str(workplace / "empty.txt")]
    assert f"error: {workplace / 'empty.txt'}: the document is empty" in fault


def test_replace_takes_the_name_from_other_documents(workplace: Path, folder: Path, tmp_path: Path) -> None:
    """A name is a path as it is given: another file of the same last part is another document."""
    before = ids(folder)
    (tmp_path / "barge.txt").write_text(TEXT, encoding="utf-8")
    code, shown, fault = run("add", folder, tmp_path / "barge.txt", "--replace")
    assert code == 0, fault
    assert shown.rstrip().endswith("built")
    assert before["barge.txt"] in Catalog.open(folder)
    (tmp_path / "barge.txt").write_text(TEXT + TEXT, encoding="utf-8")
    replaced = Catalog.open(folder).entry(str(tmp_path / "barge.txt")).id
    _, shown, _ = run("add", folder, tmp_path / "barge.txt", "--replace")
    assert shown.rstrip().endswith(f"built, instead of {replaced[:12]}")
    found = Catalog.open(folder)
    assert replaced not in found
    assert before["barge.txt"] in found
    assert len(found.entries()) == 3


def test_a_text_stays_while_it_has_a_name(workplace: Path, folder: Path, tmp_path: Path) -> None:
    before = ids(folder)
    copy = shutil.copy(workplace / "barge.txt", tmp_path / "copy.txt")
    assert run("add", folder, copy)[0] == 0
    code, shown, _ = run("remove", folder, workplace / "barge.txt")
    assert (code, shown) == (0, f"{before['barge.txt'][:12]}: removed; the text stays as {copy}\n")
    assert Catalog.open(folder).entry("copy.txt").id == before["barge.txt"]
    assert run("remove", folder, "copy.txt")[:2] == (0, f"{before['barge.txt'][:12]}: removed\n")
    assert before["barge.txt"] not in Catalog.open(folder)


def test_a_word_for_several_names_of_one_text_is_refused(workplace: Path, folder: Path, tmp_path: Path) -> None:
    copy = shutil.copy(workplace / "barge.txt", tmp_path / "barge.txt")
    assert run("add", folder, copy)[0] == 0
    code, _, fault = run("remove", folder, "barge.txt")
    assert code == 2
    assert "'barge.txt' is 2 names of one text" in fault
    assert ids(folder).keys() == {"barge.txt", "cutter.txt"}


def test_create_fits_the_codes_on_texts_and_adds_none_of_them(workplace: Path, tmp_path: Path) -> None:
    words = ("--model", workplace / "model", "--recipe", workplace / "small.toml")
    texts = ("--texts", workplace / "barge.txt", "--texts", workplace / "cutter.txt")
    code, shown, fault = run("create", tmp_path / "c", *words, *texts)
    assert code == 0, fault
    assert shown == f"{tmp_path / 'c'}: of {workplace / 'model'}, fitted\n"
    assert Catalog.open(tmp_path / "c").entries() == []
    (before,) = (tmp_path / "c" / "transforms").glob("*.parquet")
    assert run("add", tmp_path / "c", workplace / "dinghy.txt")[0] == 0
    assert [*(tmp_path / "c" / "transforms").glob("*.parquet")] == [before]


def test_create_without_texts_leaves_that_to_the_first_document(workplace: Path, tmp_path: Path) -> None:
    words = ("--model", workplace / "model", "--recipe", workplace / "small.toml", "--json")
    code, shown, fault = run("create", tmp_path / "c", *words)
    assert code == 0, fault
    model = str(workplace / "model")
    assert json.loads(shown) == {"catalog": str(tmp_path / "c"), "model": model, "fitted": False}


def test_create_fits_on_all_texts_or_on_none(workplace: Path, tmp_path: Path) -> None:
    texts = ("--texts", workplace / "barge.txt", "--texts", tmp_path / "missing.txt")
    code, _, fault = run("create", tmp_path / "c", "--model", workplace / "model", *texts)
    assert code != 0
    assert "missing.txt' cannot be read" in fault
    assert not (tmp_path / "c").exists()


def test_list_shows_each_document_and_the_sum(folder: Path) -> None:
    code, shown, _ = run("list", folder)
    entries = Catalog.open(folder).entries()
    assert code == 0
    for entry in entries:
        assert any(entry.id[:12] in line and entry.name in line for line in shown.splitlines())
    assert shown.splitlines()[-1].startswith(f"2 documents, {sum(entry.tokens for entry in entries):,} tokens, ")


def test_list_writes_one_json_object_of_what_matches(workplace: Path, folder: Path) -> None:
    code, shown, fault = run("list", folder, "CUTTER", "--json")
    (entry,) = Catalog.open(folder).entries("cutter.txt")
    assert (code, fault) == (0, "")
    assert json.loads(shown) == {
        "catalog": str(folder),
        "model": str(workplace / "model"),
        "documents": [
            {
                "id": entry.id,
                "name": str(workplace / "cutter.txt"),
                "tokens": entry.tokens,
                "bytes": entry.bytes,
                "path": str(entry.path),
            }
        ],
        "tokens": entry.tokens,
        "bytes": entry.bytes,
    }


def test_list_of_nothing_is_a_sum_of_nothing(folder: Path) -> None:
    assert run("list", folder, "nothing") == (0, "0 documents, 0 tokens, 0 B\n", "")


def test_a_removed_document_is_gone_from_the_list_and_freed_later(folder: Path) -> None:
    found = ids(folder)
    removed = found["barge.txt"]
    assert run("remove", folder, "barge.txt") == (0, f"{removed[:12]}: removed\n", "")
    assert ids(folder).keys() == {"cutter.txt"}
    assert run("gc", folder) == (0, "0 documents and 0 temporary folders, 0 B freed\n", "")
    code, shown, _ = run("gc", folder, "--grace", 0, "--dry-run", "--json")
    account = json.loads(shown)
    assert (code, account["documents"], account["dry_run"]) == (0, [removed], True)
    assert account["bytes"] > 0
    code, shown, _ = run("gc", folder, "--grace", 0)
    assert shown.splitlines()[0] == f"{removed[:12]}: deleted"
    assert not (folder / "documents" / removed).exists()


def test_remove_goes_on_after_a_document_that_is_not_there(folder: Path) -> None:
    wanted = ids(folder)["cutter.txt"]
    code, shown, fault = run("remove", folder, "nothing", wanted[:8], "--json")
    account = json.loads(shown)
    assert code == 2
    assert account["removed"] == [{"document": wanted[:8], "id": wanted, "kept_as": []}]
    assert [each["document"] for each in account["failed"]] == ["nothing"]
    assert fault.startswith("error: nothing: no document 'nothing' in the catalog: it holds ")


def test_a_document_too_damaged_to_be_listed_is_removed_by_its_id(folder: Path) -> None:
    damaged = ids(folder)["barge.txt"]
    (folder / "documents" / damaged / "manifest.json").write_text("{", encoding="utf-8")
    assert run("remove", folder, damaged)[0] == 0
    code, shown, fault = run("list", folder)
    assert (code, fault) == (0, "")
    assert "1 document, " in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("add", "nowhere", "{}/barge.txt"), "there is no catalog in 'nowhere' yet; give --model"),
        (("add", "nowhere", "missing.txt", "--model", "demo"), "'missing.txt' cannot be read"),
        (("add", "{}/model", "{}/barge.txt", "--model", "demo"), "exists and is not a catalog"),
        (("add", "{}/c", "{}/barge.txt", "--recipe", "missing.toml"), "recipe file 'missing.toml' cannot be read"),
        (("list", "nowhere"), "no catalog in 'nowhere': there is no such folder"),
        (("remove", "nowhere", "x"), "no catalog in 'nowhere'"),
        (("gc", "{}/c", "--grace", -1), "the grace period is -1.0 s"),
    ],
)
def test_wrong_input_is_one_sentence(workplace: Path, words: tuple[object, ...], said: str) -> None:
    code, shown, fault = run(*(str(word).format(workplace) for word in words))
    assert code != 0
    assert not shown
    assert said in fault
    assert "\n" not in fault


def test_another_recipe_or_dtype_than_the_catalogs_is_refused(workplace: Path, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text("tokens_per_cluster = 8\n", encoding="utf-8")
    _, _, fault = run("add", folder, workplace / "dinghy.txt", "--recipe", tmp_path / "other.toml")
    assert "recipe has tokens_per_cluster 4, and 8 was asked for" in fault
    code, _, fault = run("add", folder, workplace / "dinghy.txt", "--dtype", "bf16")
    assert code != 0
    assert fault


@pytest.mark.parametrize("command", CATALOG_COMMANDS)
def test_help_teaches_with_an_example(command: str) -> None:
    code, shown, _ = run(command, "--help")
    assert code == 0
    assert f"ragkv catalog {command} library" in shown.split("Example", 1)[1]
