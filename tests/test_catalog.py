"""A catalog holds each text once, and is of one model, one layout and one recipe."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ragkv import Archive, LoadedModel, PromptLayout, attach
from ragkv.archive.verify import verify_archive
from ragkv.catalog.catalog import Catalog
from ragkv.errors import (
    ArchiveCorruptError,
    ArchiveFormatError,
    ArchiveNotFoundError,
    ConfigError,
    ModelMismatchError,
)
from ragkv.model import fingerprint
from tests.archives import SMALL, archive_of, loaded
from tests.catalogs import PLAIN, documents, fill, make
from tests.forge import listing
from tests.tiny import TEXT, tiny_model


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A catalog of three documents; do not change it."""
    return fill(tmp_path_factory.mktemp("filled") / "c")


@pytest.fixture
def catalog(filled: Path, tmp_path: Path) -> Catalog:
    """A copy of it."""
    return make(shutil.copytree(filled, tmp_path / "c"))


# --- content and names


def test_the_same_text_twice_is_one_archive_under_both_names(tmp_path: Path) -> None:
    catalog = make(tmp_path / "c")
    first, second = catalog.add(TEXT, name="a"), catalog.add(TEXT, name="b")
    assert (first.built, second.built) == (True, False)
    assert second == replace(first, built=False, names=("a", "b"))
    assert catalog.entry("a") == catalog.entry("b") == second
    assert documents(catalog) == [first.id]
    assert first.id == catalog.document_id(TEXT)
    assert first.id in catalog


def test_an_entry_says_what_the_archive_is(catalog: Catalog) -> None:
    for entry in catalog.entries():
        archive = Archive.open(entry.path, loaded("llama"))
        assert entry.tokens == archive.manifest.document_tokens
        assert entry.bytes == archive.disk_bytes
        assert verify_archive(entry.path) == []


def test_layout_recipe_and_model_each_give_another_id(tmp_path: Path) -> None:
    bos = loaded("llama", adds_bos=True)
    other_layout = PromptLayout.from_prompt("Say: {document} {question}")
    catalogs = [
        make(tmp_path / "a"),
        make(tmp_path / "b", loaded("gemma3")),
        make(tmp_path / "c", bos),
        Catalog.create(tmp_path / "d", loaded("llama"), layout=other_layout, recipe=SMALL),
        Catalog.create(tmp_path / "e", loaded("llama"), layout=PLAIN, recipe=replace(SMALL, window_tokens=17)),
    ]
    assert len({catalog.document_id(TEXT) for catalog in catalogs}) == 5
    assert make(tmp_path / "f").document_id(TEXT) == catalogs[0].document_id(TEXT)


def test_documents_are_listed_by_name_and_found_by_part_of_it_or_start_of_the_id(catalog: Catalog) -> None:
    entries = catalog.entries()
    assert [entry.name for entry in entries] == ["Barge.txt", "cutter.txt", "dinghy.txt"]
    assert [entry.name for entry in catalog.entries("BARGE")] == ["Barge.txt"]
    assert catalog.entries(entries[1].id[:7]) == [entries[1]]
    assert catalog.entries("nothing") == []


def test_an_entry_is_found_by_id_start_of_an_id_and_name(catalog: Catalog) -> None:
    entry = catalog.entries()[2]
    assert catalog.entry(entry.id) == catalog.entry(entry.id[:6]) == catalog.entry("dinghy.txt") == entry
    with pytest.raises(ArchiveNotFoundError, match=r"no document 'dinghy' in the catalog: it holds .*\(Barge.txt\)"):
        catalog.entry("dinghy")
    with pytest.raises(ArchiveNotFoundError):
        catalog.entry(entry.id[:5])


def test_a_name_of_two_documents_is_refused_and_both_are_named(catalog: Catalog) -> None:
    new = catalog.add(TEXT, name="dinghy.txt")
    with pytest.raises(ConfigError, match=rf"'dinghy.txt' is 2 documents: .*{new.id[:12]}.*give the start of one id"):
        catalog.entry("dinghy.txt")


@pytest.mark.parametrize("name", ["../x", "", "a" * 63, "A" * 64, "a" * 63 + "/", "a" * 64 + "\n"])
def test_what_is_not_an_id_never_becomes_a_path(catalog: Catalog, name: str) -> None:
    (catalog.path / "x").mkdir()
    for call in (catalog.archive, catalog.remove):
        with pytest.raises(ConfigError, match="give 64 lower-case hexadecimal digits"):
            call(name)
    assert name not in catalog


# --- one model, one layout, one recipe


def test_creating_again_opens_what_is_there(catalog: Catalog) -> None:
    before = listing(catalog.path)
    again = Catalog.create(catalog.path, loaded("llama"))
    assert (again.layout, again.recipe, again.model_name) == (PLAIN, SMALL, "tiny-llama")
    assert again.entries() == catalog.entries()
    assert listing(catalog.path) == before


def test_another_model_is_refused_and_both_are_named(catalog: Catalog) -> None:
    for call in (Catalog.create, Catalog.open):
        with pytest.raises(
            ModelMismatchError, match=r"catalog .*'tiny-llama'; loaded is 'tiny-gemma3'.* model_type is"
        ):
            call(catalog.path, loaded("gemma3"))


def test_another_layout_or_recipe_is_refused_and_both_are_named(catalog: Catalog) -> None:
    with pytest.raises(ConfigError, match="recipe has tokens_per_cluster 4, and 9 was asked for"):
        Catalog.create(catalog.path, loaded("llama"), recipe=replace(SMALL, tokens_per_cluster=9))
    with pytest.raises(ConfigError, match=r"layout has prefix 'Read the document.*', and 'Say: ' was asked for"):
        Catalog.create(catalog.path, loaded("llama"), layout=PromptLayout.from_prompt("Say: {document} {question}"))


def test_without_a_model_a_catalog_is_listed_and_cleared_up_but_neither_read_nor_filled(catalog: Catalog) -> None:
    bare = Catalog.open(catalog.path)
    entry = bare.entries()[0]
    bare.remove(entry.id)
    assert len(bare.gc(0).documents) == 1
    for call in (lambda: bare.add(TEXT), lambda: bare.archive(entry.id), lambda: bare.document_id(TEXT)):
        with pytest.raises(ConfigError, match="was opened without a model; load 'tiny-llama'"):
            call()


def test_a_model_in_another_dtype_reads_but_does_not_add(catalog: Catalog) -> None:
    half = LoadedModel(
        model=attach(tiny_model("llama").to(torch.bfloat16)), tokenizer=loaded("llama").tokenizer, name="half"
    )
    made = make(catalog.path.parent / "half", half)
    entry = made.add(TEXT)
    wider = Catalog.open(made.path, loaded("llama"))  # in bfloat16 the two have the same weights
    assert wider.archive(entry.id).layers[0].keys.dtype == torch.float32
    with pytest.raises(ConfigError, match="holds bfloat16 and the model is loaded in float32"):
        wider.add(TEXT)


def test_the_weights_are_hashed_once(filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[torch.dtype] = []
    real = fingerprint.weights_sha256
    monkeypatch.setattr(fingerprint, "weights_sha256", lambda model, dtype: calls.append(dtype) or real(model, dtype))
    fresh = LoadedModel(model=attach(tiny_model("llama")), tokenizer=loaded("llama").tokenizer, name="tiny-llama")
    catalog = make(shutil.copytree(filled, tmp_path / "c"), fresh)
    new = catalog.add(TEXT, name="new")
    for entry in catalog.entries():
        catalog.archive(entry.id)
    assert new.built
    assert calls == [torch.float32]


# --- the head


@pytest.mark.parametrize(
    ("old", "new", "error", "said"),
    [
        ('"version": 2,', '"version": 3,', ArchiveFormatError, "format version 3, this release reads 2"),
        ("ragkv-catalog", "ragkv-archive", ArchiveFormatError, "not a ragkv-catalog file"),
        ("tiny-llama", "tiny-lemur", ArchiveCorruptError, "checksum does not hold"),
        ('"sink_tokens": 4', '"sink_tokens": 5', ArchiveCorruptError, "checksum does not hold"),
        ('"layout"', "", ArchiveCorruptError, "not valid JSON"),
    ],
)
def test_a_head_that_was_altered_is_one_error(
    catalog: Catalog, old: str, new: str, error: type[Exception], said: str
) -> None:
    head = catalog.path / "catalog.json"
    text = head.read_text(encoding="utf-8")
    assert text.count(old) == 1
    head.write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(error, match=said):
        Catalog.open(catalog.path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda body: body["model"].pop("dtype"), "dtype"),
        (lambda body: body["model"].update(dtype="int8"), "model.dtype is 'int8'"),
        (lambda body: body.update(created_by=3), "created_by is 3, not text"),
        (lambda body: body["recipe"].update(sink_tokens=-1), "sink_tokens is -1"),
        (lambda body: body.update(extra=1), "fields that format version 2 does not have"),
        (lambda body: body.update(layout=[]), "field missing or of the wrong kind"),
    ],
)
def test_a_head_with_wrong_fields_under_a_right_checksum_is_one_error(
    catalog: Catalog, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    head = catalog.path / "catalog.json"
    body = json.loads(head.read_text(encoding="utf-8"))
    del body["sha256"]
    change(body)
    head.write_text(json.dumps({**body, "sha256": fingerprint.json_sha256(body)}) + "\n", encoding="utf-8")
    with pytest.raises(ArchiveFormatError, match=said):
        Catalog.open(catalog.path)


@pytest.mark.parametrize("kept", [0, 0.5, 0.99])
def test_a_head_that_was_cut_is_one_error(catalog: Catalog, kept: float) -> None:
    head = catalog.path / "catalog.json"
    raw = head.read_bytes()
    head.write_bytes(raw[: int(len(raw) * kept)])
    with pytest.raises(ArchiveCorruptError):
        Catalog.create(catalog.path, loaded("llama"))


def test_a_place_with_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    archive_of(tmp_path / "archive", document=TEXT)
    (tmp_path / "file").write_text("years of work")
    before = listing(tmp_path)
    for name in ("archive", "file"):
        with pytest.raises(ConfigError, match="exists and is not a catalog"):
            make(tmp_path / name)
    for name, said in (("archive", "it is a single archive"), ("nowhere", "there is no such folder")):
        with pytest.raises(ArchiveNotFoundError, match=said):
            Catalog.open(tmp_path / name)
    assert listing(tmp_path) == before
