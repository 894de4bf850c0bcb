"""Catalogs that were damaged, deleted, linked or filled to the last byte, and names that are no names."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import ragkv.catalog.catalog
from ragkv.catalog.catalog import Catalog
from ragkv.cli.app import app
from ragkv.errors import ArchiveCorruptError, ArchiveNotFoundError, ConfigError
from tests.archives import CODED, SMALL, loaded
from tests.catalogs import PLAIN, TEXTS, documents, fill, make
from tests.tiny import TEXT, tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("catalogs") / "filled")


@pytest.fixture
def catalog(filled: Path, tmp_path: Path) -> Catalog:
    """A copy of a catalog of three documents."""
    return Catalog.open(shutil.copytree(filled, tmp_path / "a catalog"), loaded("llama"))


# Adding mends


def lose_the_manifest(place: Path) -> None:
    (place / "manifest.json").unlink()


def put_a_folder_for_the_manifest(place: Path) -> None:
    lose_the_manifest(place)
    (place / "manifest.json").mkdir()


def put_a_file(place: Path) -> None:
    shutil.rmtree(place)
    place.write_text("not an archive", encoding="utf-8")


def put_a_dangling_link(place: Path) -> None:
    shutil.rmtree(place)
    place.symlink_to(place.parent / "nowhere")


@pytest.mark.parametrize("damage", [lose_the_manifest, put_a_folder_for_the_manifest, put_a_file, put_a_dangling_link])
def test_adding_mends_a_place_without_an_archive(catalog: Catalog, damage: Callable[[Path], None]) -> None:
    document_id = catalog.document_id(TEXTS[0])
    damage(catalog.path / "documents" / document_id)
    assert document_id not in catalog
    with pytest.raises(ArchiveNotFoundError, match="is not in the catalog"):
        catalog.archive(document_id)
    entry = catalog.add(TEXTS[0], name="mended")
    assert (entry.id, entry.name, entry.built) == (document_id, "mended", True)
    assert catalog.archive(document_id).n_tokens > 0
    assert len(documents(catalog)) == 3, "nothing is left of what stood there"
    assert not entry.path.is_symlink()


@pytest.mark.parametrize("damage", [put_a_file, put_a_dangling_link])
def test_a_place_without_an_archive_is_removed_and_cleared_up(catalog: Catalog, damage: Callable[[Path], None]) -> None:
    document_id = catalog.document_id(TEXTS[0])
    damage(catalog.path / "documents" / document_id)
    catalog.remove(document_id)
    assert catalog.gc(0).documents == (document_id,)
    assert document_id not in documents(catalog)


# Links


def test_of_a_linked_archive_the_link_is_deleted(catalog: Catalog, tmp_path: Path) -> None:
    document_id = catalog.document_id(TEXTS[0])
    place = catalog.path / "documents" / document_id
    place.rename(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    assert catalog.archive(document_id).name == "Barge.txt"
    catalog.remove(document_id)
    freed = catalog.gc(0)
    assert freed.bytes < 1000, "the archive itself is not freed"
    assert len(documents(catalog)) == 2, "and no link is left"
    assert (tmp_path / "elsewhere" / "manifest.json").is_file()


def test_a_link_to_a_catalog_is_that_catalog(catalog: Catalog, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(catalog.path)
    entry = Catalog.open(tmp_path / "link", loaded("llama")).add(TEXT, name="through the link")
    assert entry.id in catalog


# Gone or replaced while it is open


def test_nothing_is_added_where_the_catalog_was_deleted(catalog: Catalog) -> None:
    shutil.rmtree(catalog.path)
    with pytest.raises(ArchiveNotFoundError, match="there is no such folder"):
        catalog.add(TEXT)
    assert not catalog.path.exists()


def test_nothing_is_added_where_another_catalog_stands_by_now(catalog: Catalog) -> None:
    shutil.rmtree(catalog.path)
    other = Catalog.create(catalog.path, loaded("llama"), layout=PLAIN, recipe=CODED)
    with pytest.raises(ConfigError, match="is another one than when it was opened"):
        catalog.add(TEXT)
    assert not (other.path / "documents").exists()


def test_nothing_is_added_where_the_head_was_damaged(catalog: Catalog) -> None:
    (catalog.path / "catalog.json").write_text("{", encoding="utf-8")
    with pytest.raises(ArchiveCorruptError, match="it was cut short"):
        catalog.add(TEXT)
    assert len(documents(catalog)) == 3


@pytest.mark.parametrize("folder", ["documents", "removed"])
def test_a_file_in_place_of_a_folder_is_one_sentence(catalog: Catalog, folder: str) -> None:
    shutil.rmtree(catalog.path / folder, ignore_errors=True)
    (catalog.path / folder).write_text("x", encoding="utf-8")
    for use in (catalog.entries, lambda: catalog.gc(0), lambda: catalog.remove(catalog.document_id(TEXTS[0]))):
        with pytest.raises(ConfigError, match=r"Not a directory|File exists"):
            use()


# The system refuses


def test_a_full_disk_is_one_sentence_and_leaves_nothing(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: object, **_options: object) -> None:
        raise OSError(28, "Error writing bytes to file.\nDetail: No space left on device")

    before = documents(catalog)
    monkeypatch.setattr("ragkv.build.builder.write_tokens", full)
    with pytest.raises(ConfigError, match=r"cannot write the archive .* Detail: No space left on device") as caught:
        catalog.add(TEXT)
    assert "\n" not in str(caught.value)
    assert documents(catalog) == before


def test_adding_what_is_there_writes_nothing(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a program that adds its documents when it starts runs on a catalog that is read only."""

    def refuse(self: Path, **_options: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", refuse)
    assert not catalog.add(TEXTS[0]).built
    catalog.remove(catalog.document_id(TEXTS[0]))
    with pytest.raises(ConfigError, match=r"cannot change the catalog .* Read-only"):
        catalog.add(TEXTS[0])


def test_an_interrupted_add_leaves_nothing_and_can_be_repeated(catalog: Catalog) -> None:
    def interrupt(stage: str, done: int, _total: int) -> None:
        if (stage, done) == ("cluster", 1):
            raise KeyboardInterrupt

    before = documents(catalog)
    with pytest.raises(KeyboardInterrupt):
        catalog.add(TEXT, on_progress=interrupt)
    assert documents(catalog) == before
    assert catalog.add(TEXT).built


# The command


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """A folder with a saved tiny model, a recipe, and the texts of the catalog; the working folder."""
    tiny_model("llama").save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "small.toml").write_text(SMALL.to_toml(), encoding="utf-8")
    return tmp_path


def run(*words: object) -> tuple[int, str, str]:
    """Exit code, stdout, and stderr with the error that the console entry point would show."""
    result = CliRunner().invoke(app, [str(word) for word in words], prog_name="ragkv", env={"COLUMNS": "200"})
    fault = "" if result.exception is None else str(result.exception)
    return result.exit_code, result.stdout, result.stderr + fault


def write(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def test_names_keep_to_their_line_and_command_no_terminal(workplace: Path) -> None:
    names = (
        "-dash.txt",
        "new\nline.txt",
        "red\x1b[31m.txt",
        "[red]x.txt",
        "\u200f\u0639 \U0001f469\u200d\U0001f467.txt",
    )
    files = [write(workplace / "texts", name, TEXT + name) for name in names]
    recipe = workplace / "small.toml"
    code, shown, fault = run(
        "catalog", "add", workplace / "c", *files, "--model", workplace / "model", "--recipe", recipe
    )
    assert code == 0, fault
    assert len(shown.splitlines()) == len(names)
    _, listed, _ = run("catalog", "list", workplace / "c")
    for text in (shown, listed):
        assert "\x1b" not in text
        for name in ("-dash.txt", "new\\nline.txt", "red\\x1b[31m.txt", "[red]x.txt", names[-1]):
            assert name in text
    _, told, _ = run("catalog", "list", workplace / "c", "--json")
    assert sorted(Path(row["name"]).name for row in json.loads(told)["documents"]) == sorted(names)
    code, _, fault = run("catalog", "remove", workplace / "c", "--", "-dash.txt", "no\nname")
    assert code == 2
    assert len(fault.splitlines()) == 2, "one line of error, and the exit code"


def test_replace_keeps_a_text_that_the_same_command_added(workplace: Path) -> None:
    """Both files got another text, and the first got the one that the second had."""
    a, b = (write(workplace / "texts", name, text) for name, text in (("a", TEXTS[0]), ("b", TEXTS[1])))
    into, recipe = workplace / "c", workplace / "small.toml"
    assert run("catalog", "add", into, a, b, "--model", workplace / "model", "--recipe", recipe)[0] == 0
    a.write_text(TEXTS[1], encoding="utf-8")
    b.write_text(TEXTS[2], encoding="utf-8")
    code, _, fault = run("catalog", "add", into, a, b, "--replace")
    assert code == 0, fault
    catalog = make(into)
    held = [catalog.document_id(text) in catalog for text in TEXTS]
    assert held == [False, True, True]


def test_ask_opens_documents_of_a_catalog_as_the_catalog_does(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are hashed once, in the dtype of the catalog; an archive under the id of another is refused."""
    files = [write(workplace / "texts", name, text) for name, text in zip("abc", TEXTS, strict=True)]
    into, recipe, model = workplace / "c", workplace / "small.toml", workplace / "model"
    assert run("catalog", "add", into, *files, "--model", model, "--recipe", recipe, "--dtype", "bf16")[0] == 0
    hashed: list[object] = []
    real = ragkv.model.fingerprint.weights_sha256

    def counted(*words: object) -> str:
        hashed.append(words[1])
        return real(*words)

    monkeypatch.setattr("ragkv.model.fingerprint.weights_sha256", counted)
    ask = ("ask", "Who?", "--max-new-tokens", 2)
    assert run(*ask, "--catalog", into)[0] == 0
    assert [str(dtype) for dtype in hashed] == ["torch.bfloat16"]
    hashed.clear()
    entries = Catalog.open(into).entries()
    archives = [word for entry in entries for word in ("--archive", entry.path)]
    assert run(*ask, *archives)[0] == 0
    assert [str(dtype) for dtype in hashed] == ["torch.bfloat16"]
    _, _, fault = run(*ask, "--archive", into)
    assert f"--archive is '{into}', a catalog; give it as --catalog" in fault
    other = workplace / "other"
    tiny_model("llama", seed=1).save_pretrained(other)
    tiny_tokenizer().save_pretrained(other)
    _, _, fault = run(*ask, *archives, "--model", other)
    assert f"'{entries[0].path}': the archive was built with another model" in fault, "says which of them"
    shutil.rmtree(entries[1].path)
    shutil.copytree(entries[0].path, entries[1].path)
    code, _, fault = run(*ask, "--catalog", into)
    assert code != 0
    assert "is not the document that its id says" in fault
