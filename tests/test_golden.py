"""Archives that an earlier build wrote are read as they always were: they guard the meaning of the format."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ragkv import Archive
from ragkv.manifest import list_archives
from ragkv.verify import verify_archive
from tests.forge import listing
from tests.make_golden import (
    ARCHIVES,
    EVERYTHING,
    EXPECTED,
    FEW,
    FOLDER,
    dense_tokens,
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
    assert list_archives(FOLDER) == sorted(ARCHIVES)


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
    archive = Archive.open(FOLDER / "v1", load_golden_model())
    assert greedy_tokens(archive) == dense_tokens(archive)


def test_golden_archives_are_not_replaced() -> None:
    before = listing(FOLDER)
    with pytest.raises(SystemExit, match="stand in golden already"):
        main()
    assert listing(FOLDER) == before
