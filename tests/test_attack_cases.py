"""What a new user gives by mistake: each is refused in one sentence, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ragkv import (
    Archive,
    ArchiveCache,
    Catalog,
    Composition,
    LoadedModel,
    PromptLayout,
    RagkvError,
    Recipe,
    Weighting,
    ask,
    build_archive,
    load_model,
    prefill_document,
)
from ragkv.archive.payload import decode_exact, encode_exact
from ragkv.cli.app import app
from ragkv.errors import ArchiveNotFoundError, ConfigError
from tests.archives import CODED, DOCUMENT, SMALL, archive_of, loaded
from tests.tiny import tiny_model, tiny_tokenizer

LAYERS = Recipe(layer_codecs={"7": {"key_codec": "int2"}})


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Archive:
    return archive_of(tmp_path_factory.mktemp("attack") / "a")


def test_the_help_of_build_names_the_default_of_the_recipe() -> None:
    shown = " ".join(CliRunner().invoke(app, ["build", "--help"]).output.split())
    assert f"Mean tokens per cluster; overrides the recipe. [default: {Recipe().tokens_per_cluster}]" in shown


@pytest.mark.parametrize("texts", [[""], ["a"], [DOCUMENT, ""], [DOCUMENT * 20], DOCUMENT])
def test_texts_that_cannot_be_fitted_on_leave_no_catalog_behind(tmp_path: Path, texts: Any) -> None:
    with pytest.raises(ConfigError):
        Catalog.create(tmp_path / "c", loaded("llama"), texts=texts)
    assert not (tmp_path / "c").exists()
    # So the next try may choose another recipe.
    made = Catalog.create(tmp_path / "c", loaded("llama"), recipe=CODED, texts=[DOCUMENT])
    assert made.has_transforms
    assert made.recipe == CODED


def test_a_recipe_of_layers_that_the_model_has_not_makes_no_catalog(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no layer 7"):
        Catalog.create(tmp_path / "c", loaded("llama"), recipe=LAYERS)
    assert not (tmp_path / "c").exists()


def test_who_takes_a_catalog_for_an_archive_is_told(tmp_path: Path) -> None:
    Catalog.create(tmp_path / "c", loaded("llama"), layout=PromptLayout.plain(), recipe=SMALL).add(DOCUMENT, name="d")
    with pytest.raises(ArchiveNotFoundError, match="it is a catalog"):
        Archive.open(tmp_path / "c", loaded("llama"))


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda archive, path: build_archive(archive.model, b"bytes", path), "document is a bytes"),
        (lambda archive, path: build_archive(archive.model, None, path), "document is a NoneType"),
        (
            lambda archive, path: build_archive(archive.model, "text", path, recipe={"window_tokens": 4}),
            "recipe is a dict",
        ),
        (lambda archive, path: build_archive(archive.model, "text", path, layout="plain"), "layout is a str"),
        (lambda archive, path: build_archive(archive.model, "text", path, document_name=3), "document_name is a int"),
        (lambda archive, path: build_archive(archive.model.model, "text", path), "LoadedModel.of"),
        (lambda archive, _path: prefill_document(archive.model, b"bytes"), "document is a bytes"),
        (lambda archive, _path: ask(archive, None), "question is a NoneType"),
        (lambda archive, _path: archive.questions([3]), "question is a int"),
        (lambda _archive, _path: ask("indexes/report", "Who?"), "Archive.open"),
        (lambda _archive, _path: ArchiveCache("indexes/report"), "Archive.open"),
        (lambda _archive, _path: Composition("indexes/report"), "Archive.open"),
        (lambda archive, path: Archive.open(path, archive.model.model), "LoadedModel.of"),
        (lambda _archive, path: Archive.open(path, None), "LoadedModel.of"),
        (lambda archive, path: Catalog.create(path, archive.model.model), "LoadedModel.of"),
        (lambda _archive, _path: Weighting("0.9", 1.0), "temperature is '0.9'"),
        (lambda _archive, _path: load_model(None), "name is None"),
        (lambda _archive, path: load_model(path), "no such folder"),
        (lambda _archive, _path: load_model(Path("./no-such-model")), "no such folder"),
    ],
)
def test_what_is_of_the_wrong_kind_is_refused_in_one_sentence(
    archive: Archive, tmp_path: Path, call: Callable[[Archive, Path], object], told: str
) -> None:
    with pytest.raises(RagkvError, match=told) as refused:
        call(archive, tmp_path / "x")
    assert "\n" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_a_model_may_be_named_by_a_path(tmp_path: Path) -> None:
    loaded("llama").model.save_pretrained(tmp_path / "m")
    loaded("llama").tokenizer.save_pretrained(tmp_path / "m")
    assert load_model(tmp_path / "m").fingerprint() == loaded("llama").fingerprint()


@pytest.mark.parametrize("dim", [2, 6, 10, 18, 34, 64])
@pytest.mark.parametrize("codec", ["lossless", "int8"])
def test_a_single_exact_token_is_read_whatever_its_key_leaves_of_a_word(dim: int, codec: str) -> None:
    token = torch.arange(1.0, dim + 1).reshape(1, 1, dim)
    key = encode_exact(token, "int8")
    row = torch.cat([key, encode_exact(token, codec)], dim=-1)
    value = decode_exact(row[..., key.shape[-1] :], codec, torch.float32)
    torch.testing.assert_close(value, token, atol=dim / 127, rtol=0)


def test_a_model_in_a_dtype_of_no_archive_is_refused_before_anything_is_computed() -> None:
    with pytest.raises(ConfigError, match="the model is held in"):
        LoadedModel.of(tiny_model("llama").double(), tiny_tokenizer(), name="x")
