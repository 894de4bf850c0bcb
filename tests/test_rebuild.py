"""What is built again and what is not: damage is, passing trouble and another default policy are not."""

from __future__ import annotations

import dataclasses
import errno
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ragkv import Archive, Catalog, PromptLayout, RecallPolicy, build_archive
from ragkv.archive.manifest import read_manifest
from ragkv.archive.verify import verify_archive
from ragkv.build.builder import is_current, keep_policy
from ragkv.cli.app import app
from ragkv.errors import ArchiveReadError
from ragkv.llamaindex import resolve
from tests.archives import SMALL, archive_of, loaded
from tests.catalogs import TEXTS, make
from tests.forge import hashes
from tests.llamaindex_helpers import archived_nodes, make_catalog
from tests.tiny import TEXT

PLAIN = PromptLayout.plain()
OTHER = dataclasses.replace(SMALL, recall=RecallPolicy(budget=9))


def current(path: Path) -> bool:
    return is_current(loaded("llama"), TEXT, path, recipe=SMALL, layout=PLAIN)


def flip_a_row(folder: Path) -> None:
    """One bit in the middle of the rows, which opening does not read."""
    path = folder / "rows.parquet"
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(bytes(raw))


def test_a_damaged_row_makes_an_archive_one_to_build_again(tmp_path: Path) -> None:
    build_archive(loaded("llama"), TEXT, tmp_path / "a", recipe=SMALL, layout=PLAIN)
    assert current(tmp_path / "a")
    flip_a_row(tmp_path / "a")
    assert not current(tmp_path / "a")


def test_the_command_builds_a_damaged_archive_again(tmp_path: Path) -> None:
    loaded("llama").model.save_pretrained(tmp_path / "model")
    loaded("llama").tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "harbour.txt").write_text(TEXT, encoding="utf-8")
    words = [
        "build",
        tmp_path / "harbour.txt",
        "--model",
        tmp_path / "model",
        "--layout",
        "plain",
        "--out",
        tmp_path / "i",
    ]
    first = CliRunner().invoke(app, [*map(str, words)])
    assert first.exit_code == 0, first.output
    [folder] = [found.parent for found in (tmp_path / "i").rglob("manifest.json")]
    before = hashes(folder)
    flip_a_row(folder)
    assert verify_archive(folder)
    again = CliRunner().invoke(app, [*map(str, words)])
    assert again.exit_code == 0, again.output
    assert hashes(folder) == before


def test_another_default_policy_writes_the_manifest_only(tmp_path: Path) -> None:
    archive_of(tmp_path / "a", document=TEXT)
    before = hashes(tmp_path / "a")
    assert is_current(loaded("llama"), TEXT, tmp_path / "a", recipe=OTHER, layout=PLAIN)
    assert keep_policy(tmp_path / "a", OTHER)
    assert not keep_policy(tmp_path / "a", OTHER)
    after = hashes(tmp_path / "a")
    assert {name for name in before if before[name] != after[name]} == {"manifest.json"}
    assert read_manifest(tmp_path / "a").recipe.recall.budget == 9
    assert Archive.open(tmp_path / "a", loaded("llama")).policy.budget == 9
    assert verify_archive(tmp_path / "a") == []


def test_a_catalog_takes_a_recipe_of_another_policy_and_builds_nothing_again(tmp_path: Path) -> None:
    make(tmp_path / "c").add(TEXTS[0])
    catalog = Catalog.create(tmp_path / "c", loaded("llama"), layout=PLAIN, recipe=OTHER)
    assert not catalog.add(TEXTS[0]).built


def test_a_text_stays_while_a_name_holds_it(tmp_path: Path) -> None:
    catalog = make(tmp_path / "c")
    entry = catalog.add(TEXTS[0], name="a.txt")
    assert not catalog.add(TEXTS[0], name="b.txt").built
    catalog.remove(entry.id, name="a.txt")
    assert [each.names for each in catalog.entries()] == [("b.txt",)]
    catalog.remove(entry.id, name="b.txt")
    assert catalog.entries() == []


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE, errno.ENOMEM, errno.EACCES])
def test_a_query_engine_does_not_take_passing_trouble_for_a_missing_archive(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = make_catalog(tmp_path / "c", loaded("llama"))
    nodes = archived_nodes(catalog)

    def refuse(*_args: object, **_options: object) -> None:
        raise OSError(number, "no")

    monkeypatch.setattr("ragkv.archive.files.os.open", refuse)
    with pytest.raises(ArchiveReadError):
        resolve(nodes, catalog)
