"""Archives of earlier builds are read as they always were, or refused: they guard the meaning of the format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ragkv import Archive, ArchiveCache
from ragkv.archive.manifest import list_archives
from ragkv.archive.verify import verify_archive
from ragkv.catalog.catalog import Catalog
from ragkv.errors import ArchiveFormatError
from tests.dense import dense_answer, dense_logits, stock_copy
from tests.forge import listing
from tests.make_golden import (
    ARCHIVES,
    CATALOG,
    CATALOG_TEXTS,
    EVERYTHING,
    EXPECTED,
    FEW,
    FOLDER,
    N_NEW,
    OLD,
    QUESTION,
    all_ids,
    first_logits,
    greedy_tokens,
    load_golden_model,
    main,
)

SHARED = tuple(f"{CATALOG}/{name}" for name in CATALOG_TEXTS)
"""Documents of the golden catalog, as the expected answers name them."""


def answers(name: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(EXPECTED.read_text(encoding="utf-8"))[name]
    return values


def folder_of(name: str) -> Path:
    return FOLDER / CATALOG / "documents" / answers(name)["id"] if name in SHARED else FOLDER / name


@pytest.fixture(scope="module", params=(*ARCHIVES, *SHARED))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def archive(name: str) -> Archive:
    return Archive.open(folder_of(name), load_golden_model())


@pytest.fixture
def expected(name: str) -> dict[str, Any]:
    return answers(name)


def test_every_golden_archive_is_in_the_test() -> None:
    assert list_archives(FOLDER) == sorted((*ARCHIVES, *OLD))


def test_golden_archive_is_sound(name: str) -> None:
    assert verify_archive(folder_of(name)) == []


def test_golden_catalog_lists_its_documents_under_all_their_names() -> None:
    entries = Catalog.open(FOLDER / CATALOG).entries()
    assert [(entry.names, entry.id) for entry in entries] == [
        (("barge",), answers(SHARED[1])["id"]),
        (("ferry", "the ferry again"), answers(SHARED[0])["id"]),
    ]


def test_a_text_of_the_golden_catalog_has_the_id_that_it_had() -> None:
    catalog = Catalog.open(FOLDER / CATALOG, load_golden_model(torch.bfloat16))
    ids = [catalog.document_id(text) for text in CATALOG_TEXTS.values()]
    assert ids == [answers(name)["id"] for name in SHARED]


def test_golden_archive_gives_the_same_logits_with_everything_recalled(
    archive: Archive, expected: dict[str, Any]
) -> None:
    assert first_logits(archive, EVERYTHING) == pytest.approx(expected["logits_everything"], rel=1e-3, abs=1e-3)


def test_golden_archive_gives_the_same_logits_with_few_clusters_recalled(
    archive: Archive, expected: dict[str, Any]
) -> None:
    assert first_logits(archive, FEW) == pytest.approx(expected["logits_few"], rel=1e-3, abs=1e-3)


def test_golden_archive_gives_the_same_answer(archive: Archive, expected: dict[str, Any]) -> None:
    assert greedy_tokens(archive) == expected["greedy_tokens"]


def test_golden_answer_is_that_of_dense_attention() -> None:
    archive = Archive.open(FOLDER / "v3", load_golden_model())
    assert greedy_tokens(archive) == dense_answer(stock_copy(archive.model.model), all_ids(archive), N_NEW)


def test_coded_golden_archive_with_everything_recalled_is_near_dense_attention() -> None:
    """Random keys and values have no structure to code by, so 3 bits cost more here than in a trained model."""
    archive = Archive.open(FOLDER / "v3-int3", load_golden_model())
    inputs = archive.questions([QUESTION])
    dense = dense_logits(stock_copy(archive.model.model), all_ids(archive), inputs["input_ids"].shape[1])
    near = []
    for budget in (EVERYTHING, FEW):
        with torch.no_grad():
            logits = archive.model.model(**inputs, cache=ArchiveCache(archive, budget=budget)).logits[0]
        near.append(float(torch.cosine_similarity(logits, dense, dim=-1).mean()))
    assert 0.85 < near[0] < 0.999
    assert near[0] > near[1] + 0.1


@pytest.mark.parametrize("old", OLD)
def test_an_archive_of_an_older_version_is_refused_in_one_sentence(old: str) -> None:
    told = f"manifest.json: format version {OLD[old]}, this release reads 3; build it again from the documents"
    with pytest.raises(ArchiveFormatError) as refusal:
        Archive.open(FOLDER / old, load_golden_model())
    assert str(refusal.value) == told
    assert verify_archive(FOLDER / old) == [told]


def test_golden_archives_are_not_replaced() -> None:
    before = listing(FOLDER)
    with pytest.raises(SystemExit, match="stand in golden already"):
        main()
    assert listing(FOLDER) == before
