"""``ragkv build`` and ``ragkv catalog add``: no document replaces another unsaid, and none takes the others with it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ragkv.archive.manifest import read_manifest
from ragkv.archive.verify import verify_archive
from ragkv.catalog.catalog import Catalog
from ragkv.cli.app import app
from ragkv.errors import RagkvError
from ragkv.text import read_text
from tests.tiny import TEXT, tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a saved tiny model."""
    folder = tmp_path_factory.mktemp("models") / "model"
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: two documents of one name, and files that cannot be archived."""
    monkeypatch.chdir(tmp_path)
    for folder, boat in (("a", "barge"), ("b", "cutter")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "r.txt").write_text(TEXT.replace("ferry", boat), encoding="utf-8")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "long.txt").write_text(TEXT * 40, encoding="utf-8")
    return tmp_path


def run(*words: object) -> tuple[int, str, str]:
    """Exit code, stdout, and stderr with the error that the console entry point would show."""
    result = CliRunner().invoke(app, [*map(str, words)], prog_name="ragkv")
    if result.exception is not None and not isinstance(result.exception, SystemExit | RagkvError):
        raise result.exception
    fault = "" if result.exception is None or isinstance(result.exception, SystemExit) else str(result.exception)
    return result.exit_code, result.stdout, result.stderr.strip() + fault


def name_of(archive: str) -> str:
    return read_manifest(archive).document_name


def test_the_archive_of_another_document_is_replaced_only_by_force(model: Path) -> None:
    assert run("build", "a/r.txt", "--model", model)[0] == 0
    code, _, fault = run("build", "b/r.txt", "--model", model)
    assert code == 2
    assert "'indexes/r' is the archive of 'a/r.txt', and 'b/r.txt' would replace it" in fault
    assert len(fault.splitlines()) == 1
    assert name_of("indexes/r") == "a/r.txt"
    assert run("build", "b/r.txt", "--model", model, "--force")[0] == 0
    assert name_of("indexes/r") == "b/r.txt"


def test_an_edited_document_replaces_its_own_archive(model: Path, workplace: Path) -> None:
    run("build", "a/r.txt", "--model", model)
    before = read_manifest("indexes/r").document_sha256
    (workplace / "a" / "r.txt").write_text(TEXT, encoding="utf-8")
    code, shown, _ = run("build", "./a/r.txt", "--model", model, "--json")
    assert (code, json.loads(shown)["archives"][0]["built"]) == (0, True)
    assert read_manifest("indexes/r").document_sha256 != before


def test_a_damaged_archive_is_built_again_without_force(model: Path) -> None:
    run("build", "a/r.txt", "--model", model)
    Path("indexes/r/manifest.json").write_text("{", encoding="utf-8")
    assert run("build", "a/r.txt", "--model", model)[0] == 0
    assert name_of("indexes/r") == "a/r.txt"


def test_files_that_would_have_one_archive_are_refused_before_any_is_read() -> None:
    code, shown, fault = run("build", "a/r.txt", "b/r.txt", "c/r.md", "x.md", "x.txt", "--model", "nowhere")
    assert (code != 0, shown) == (True, "")
    assert "'a/r.txt' and 'b/r.txt' and 'c/r.md' would all become 'indexes/r'" in fault
    assert "'x.md' and 'x.txt' would both become 'indexes/x'" in fault
    assert not Path("indexes").exists()


def test_a_file_given_twice_is_built_once(model: Path) -> None:
    code, shown, _ = run("build", "a/r.txt", "./a/r.txt", "--model", model, "--json")
    assert (code, len(json.loads(shown)["archives"])) == (0, 1)


def test_documents_that_fail_do_not_stop_the_others_and_are_listed_at_the_end(model: Path) -> None:
    files = ("latin.txt", "missing.txt", "long.txt", "a", "a/r.txt")
    code, shown, fault = run("build", *files, "--model", model)
    assert code == 2
    assert shown.startswith("indexes/r: ")
    lines = fault.splitlines()
    wanted = ("not UTF-8 text (byte 3)", "cannot be read: No such file", "cannot be read: Is a directory", "context")
    assert len(lines) == len(wanted)
    for line, file, said in zip(lines, ("latin.txt", "missing.txt", "a", "long.txt"), wanted, strict=True):
        assert line.startswith(f"error: {file}: ")
        assert said in line


def test_where_no_file_can_be_read_no_model_is_loaded() -> None:
    code, shown, fault = run("build", "latin.txt", "missing.txt", "--model", "nowhere")
    assert (code != 0, shown) == (True, "")
    assert "'latin.txt' is not UTF-8 text" in fault
    assert "'missing.txt' cannot be read" in fault


def test_a_byte_order_mark_is_no_text(workplace: Path) -> None:
    (workplace / "bom.txt").write_bytes("\ufeffA \ufeff report.".encode())
    assert read_text("bom.txt") == "A \ufeff report."


def test_a_file_name_that_is_not_utf8_is_archived(model: Path, workplace: Path) -> None:
    file = os.fsdecode(b"caf\xe9.txt")
    (workplace / file).write_text(TEXT, encoding="utf-8")
    code, _, fault = run("build", file, "--model", model)
    assert (code, fault) == (0, "")
    assert name_of(os.fsdecode(b"indexes/caf\xe9")) == "caf\\udce9.txt"
    assert verify_archive(os.fsdecode(b"indexes/caf\xe9")) == []
    assert run("build", file, "--model", model, "--force")[0] == 0


def names(catalog: str = "c") -> dict[str, str]:
    return {name: entry.id for entry in Catalog.open(catalog).entries() for name in entry.names}


def test_documents_of_a_catalog_are_named_by_their_path_as_given(model: Path, workplace: Path) -> None:
    assert run("catalog", "add", "c", "a/r.txt", "--model", model)[0] == 0
    assert run("catalog", "add", "c", "b/r.txt", "--replace")[0] == 0
    assert names().keys() == {"a/r.txt", "b/r.txt"}
    before = names()
    (workplace / "b" / "r.txt").write_text(TEXT, encoding="utf-8")
    code, shown, _ = run("catalog", "add", "c", "b/r.txt", "--replace", "--json")
    assert (code, json.loads(shown)["documents"][0]["replaced"]) == (0, [before["b/r.txt"]])
    assert names()["a/r.txt"] == before["a/r.txt"]
    assert names()["b/r.txt"] != before["b/r.txt"]
    assert Catalog.open("c").entry("b/r.txt").id == names()["b/r.txt"]


def test_the_base_name_finds_a_document(model: Path) -> None:
    run("catalog", "add", "c", "a/r.txt", "--model", model)
    assert Catalog.open("c").entry("r.txt").id == names()["a/r.txt"]


def test_a_text_that_moved_between_files_keeps_only_its_new_name(model: Path, workplace: Path) -> None:
    run("catalog", "add", "c", "a/r.txt", "b/r.txt", "--model", model)
    before = names()
    (workplace / "a").rename(workplace / "t")
    (workplace / "b").rename(workplace / "a")
    (workplace / "t").rename(workplace / "b")
    assert run("catalog", "add", "c", "a/r.txt", "b/r.txt", "--replace")[0] == 0
    assert names() == {"a/r.txt": before["b/r.txt"], "b/r.txt": before["a/r.txt"]}


def test_a_text_stays_in_the_catalog_while_another_file_holds_it(model: Path, workplace: Path) -> None:
    (workplace / "copy.txt").write_bytes((workplace / "a" / "r.txt").read_bytes())
    run("catalog", "add", "c", "a/r.txt", "copy.txt", "--model", model)
    before = names()
    (workplace / "a" / "r.txt").write_text(TEXT, encoding="utf-8")
    run("catalog", "add", "c", "a/r.txt", "--replace")
    assert names()["copy.txt"] == before["copy.txt"] != names()["a/r.txt"]


def test_files_that_cannot_be_read_do_not_keep_others_out_of_a_catalog(model: Path) -> None:
    code, shown, fault = run("catalog", "add", "c", "latin.txt", "a/r.txt", "missing.txt", "--model", model)
    assert code == 2
    assert "a/r.txt: " in shown
    assert [line.split(": ")[1] for line in fault.splitlines()] == ["latin.txt", "missing.txt"]
    assert names().keys() == {"a/r.txt"}
