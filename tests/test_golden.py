"""Archives of earlier builds are read as they always were, or refused: they guard the meaning of the format."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from ragkv import Archive
from ragkv.archive.manifest import list_archives
from ragkv.archive.verify import verify_archive
from ragkv.errors import ArchiveFormatError
from tests.dense import dense_answer, dense_logits, stock_copy
from tests.forge import listing
from tests.make_golden import (
    ARCHIVES,
    EVERYTHING,
    EXPECTED,
    FEW,
    FOLDER,
    N_NEW,
    OLD,
    all_ids,
    all_logits,
    first_logits,
    greedy_tokens,
    load_golden_model,
    main,
)


@pytest.fixture(scope="module", params=ARCHIVES)
def archive(request: pytest.FixtureRequest) -> Archive:
    return Archive.open(FOLDER / request.param, load_golden_model())


@pytest.fixture
def expected(archive: Archive) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(EXPECTED.read_text(encoding="utf-8"))[archive.path.name]
    return values


def test_every_golden_archive_is_in_the_test() -> None:
    assert list_archives(FOLDER) == sorted((*ARCHIVES, *OLD))


@pytest.mark.parametrize("name", ARCHIVES)
def test_golden_archive_is_sound(name: str) -> None:
    assert verify_archive(FOLDER / name) == []


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
    archive = Archive.open(FOLDER / "v2", load_golden_model())
    assert greedy_tokens(archive) == dense_answer(stock_copy(archive.model.model), all_ids(archive), N_NEW)


def test_coded_golden_archive_with_everything_recalled_is_near_dense_attention() -> None:
    """Random keys and values have no structure to code by, so 3 bits cost more here than in a trained model."""
    archive = Archive.open(FOLDER / "v2-int3", load_golden_model())
    dense = dense_logits(stock_copy(archive.model.model), all_ids(archive), 1)[0]
    everything, few = (all_logits(archive, budget) for budget in (EVERYTHING, FEW))
    assert 0.85 < float(torch.cosine_similarity(everything, dense, dim=0)) < 0.999
    assert float((everything - dense).norm()) < float((few - dense).norm())


@pytest.mark.parametrize("name", OLD)
def test_an_archive_of_an_older_version_is_refused_in_one_sentence(name: str) -> None:
    told = "manifest.json: format version 1, this release reads 2; build the archive again"
    with pytest.raises(ArchiveFormatError) as refusal:
        Archive.open(FOLDER / name, load_golden_model())
    assert str(refusal.value) == told
    assert verify_archive(FOLDER / name) == [told]


def test_golden_archives_are_not_replaced() -> None:
    before = listing(FOLDER)
    with pytest.raises(SystemExit, match="stand in golden already"):
        main()
    assert listing(FOLDER) == before
