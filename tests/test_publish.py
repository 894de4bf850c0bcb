"""An archive appears whole or not at all, is the same each time, and is only ever read afterwards."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ragkv import Archive, ArchiveCache, PromptLayout, Recipe, build_archive
from ragkv.archive.inspect import describe_archive
from ragkv.archive.manifest import list_archives, read_manifest
from ragkv.archive.publish import LOCK_FILE, staging
from ragkv.archive.verify import verify_archive
from ragkv.build.builder import BuildResult
from ragkv.errors import ArchiveNotFoundError, ConfigError
from ragkv.recipe import RecallPolicy
from tests.archives import SMALL, archive_of, loaded
from tests.forge import hashes, listing
from tests.tiny import TEXT

ROOT = Path(__file__).resolve().parent.parent
OTHER = TEXT.replace("ferry", "barge")


def names(folder: Path) -> list[str]:
    """What stands in a folder beside the lock of those who build there."""
    return sorted(found.name for found in folder.iterdir() if found.name != LOCK_FILE)


def build(
    path: Path,
    document: str = TEXT,
    *,
    recipe: Recipe = SMALL,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> BuildResult:
    return build_archive(
        loaded("llama"), document, path, recipe=recipe, layout=PromptLayout.plain(), on_progress=on_progress
    )


def stop_midway(error: BaseException) -> Callable[[str, int, int], None]:
    """Raise `error` when the second layer has been written."""

    def on_progress(stage: str, done: int, _total: int) -> None:
        if (stage, done) == ("cluster", 2):
            raise error

    return on_progress


# --- whole or not at all


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (RuntimeError("boom"), RuntimeError),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (OSError(28, "No space left on device"), ConfigError),
    ],
)
def test_a_build_that_stops_midway_leaves_nothing(
    error: BaseException, raised: type[BaseException], tmp_path: Path
) -> None:
    with pytest.raises(raised):
        build(tmp_path / "deep" / "a", on_progress=stop_midway(error))
    assert names(tmp_path / "deep") == []


def test_a_rebuild_that_fails_leaves_the_old_archive(tmp_path: Path) -> None:
    build(tmp_path / "a")
    before = listing(tmp_path)
    with pytest.raises(RuntimeError):
        build(tmp_path / "a", OTHER, on_progress=stop_midway(RuntimeError("boom")))
    assert listing(tmp_path) == before


def test_nothing_stands_at_the_path_before_the_build_is_done(tmp_path: Path) -> None:
    seen = []
    build(tmp_path / "a", on_progress=lambda stage, *_: seen.append((stage, (tmp_path / "a").exists())))
    assert ("cluster", False) in seen
    assert not any(there for _, there in seen)


def test_an_archive_that_is_being_built_is_not_listed(tmp_path: Path) -> None:
    build(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / ".b.0123456789ab.tmp")
    build(tmp_path / "c")
    assert list_archives(tmp_path) == ["c"]
    with pytest.raises(ArchiveNotFoundError, match="it holds the archives c; name one"):
        read_manifest(tmp_path)


def test_a_rebuild_replaces_the_archive_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    build(tmp_path / "a")
    new = build(tmp_path / "a", OTHER).manifest
    assert read_manifest(tmp_path / "a") == new
    assert names(tmp_path) == ["a"]
    assert verify_archive(tmp_path / "a") == []


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    build(tmp_path / "a")
    assert verify_archive(tmp_path / "a") == []


def test_a_link_to_an_archive_stays_a_link(tmp_path: Path) -> None:
    build(tmp_path / "a")
    (tmp_path / "link").symlink_to("a")
    new = build(tmp_path / "link", OTHER).manifest
    assert (tmp_path / "link").is_symlink()
    assert read_manifest(tmp_path / "a") == new
    assert names(tmp_path) == ["a", "link"]


def test_a_folder_that_is_not_an_archive_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "thesis.txt").write_text("years of work")
    before = listing(tmp_path)
    with pytest.raises(ConfigError, match="exists and is not an archive"):
        build(tmp_path / "a")
    assert listing(tmp_path) == before


def test_a_file_in_the_way_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("years of work")
    before = listing(tmp_path)
    with pytest.raises(ConfigError, match="exists and is not an archive"):
        build(tmp_path / "a")
    assert listing(tmp_path) == before


def test_a_folder_that_appeared_during_the_build_is_left_alone(tmp_path: Path) -> None:
    def on_progress(stage: str, done: int, _total: int) -> None:
        if (stage, done) == ("cluster", 2):
            (tmp_path / "a").mkdir()
            (tmp_path / "a" / "thesis.txt").write_text("years of work")

    with pytest.raises(ConfigError, match="exists and is not an archive"):
        build(tmp_path / "a", on_progress=on_progress)
    assert names(tmp_path) == ["a"]
    assert hashes(tmp_path / "a").keys() == {"thesis.txt"}


def test_a_parent_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("years of work")
    with pytest.raises(ConfigError, match=r"cannot write the archive .*File exists"):
        build(tmp_path / "a" / "b")
    assert hashes(tmp_path).keys() == {"a"}


# --- two builders


def test_of_two_builds_the_one_that_ends_last_stays(tmp_path: Path) -> None:
    def build_another(stage: str, done: int, _total: int) -> None:
        if (stage, done) == ("cluster", 2):
            build(tmp_path / "a", OTHER)

    last = build(tmp_path / "a", on_progress=build_another).manifest
    assert read_manifest(tmp_path / "a") == last
    assert names(tmp_path) == ["a"]


BUILDER = """
import sys, torch
from pathlib import Path
from tests.test_publish import OTHER, TEXT, build
torch.set_num_threads(1)
(Path(sys.argv[1]) / f"ready-{sys.argv[2]}").touch()
while len(list(Path(sys.argv[1]).glob("ready-*"))) < 2:
    pass
for _ in range(3):
    build(Path(sys.argv[1]) / "out" / "a", OTHER if sys.argv[2] == "1" else TEXT)
"""


def test_two_builders_on_one_path_end_with_one_sound_archive(tmp_path: Path) -> None:
    commands = [[sys.executable, "-c", BUILDER, str(tmp_path), name] for name in "12"]
    builders = [subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) for command in commands]
    ends = [(builder.communicate(timeout=100)[1], builder.returncode) for builder in builders]
    assert [code for _, code in ends] == [0, 0], ends
    assert names(tmp_path / "out") == ["a"]
    assert verify_archive(tmp_path / "out" / "a") == []


SWAPPER = """
import sys
from pathlib import Path
from ragkv.archive.publish import LOCK_FILE, staging
for _ in range(40):
    with staging(Path(sys.argv[1]) / "a") as folder:
        (folder / "manifest.json").write_text("{}")
"""


def test_swapping_an_archive_many_times_at_once_refuses_nobody(tmp_path: Path) -> None:
    swappers = [
        subprocess.Popen([sys.executable, "-c", SWAPPER, str(tmp_path)], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    ends = [(swapper.communicate(timeout=100)[1], swapper.returncode) for swapper in swappers]
    assert [code for _, code in ends] == [0, 0, 0], ends
    assert names(tmp_path) == ["a"]


# --- the same bytes


def test_building_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    build(tmp_path / "a")
    build(tmp_path / "b")
    assert hashes(tmp_path / "a") == hashes(tmp_path / "b")


def test_another_process_with_another_hash_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from tests.test_publish import build; build(Path(sys.argv[1]))"
    env = {"PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "2", "PATH": ""}
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "b")], cwd=ROOT, env=env, check=True, timeout=100)
    build(tmp_path / "a")
    assert hashes(tmp_path / "a") == hashes(tmp_path / "b")


def changed(tmp_path: Path, recipe: Recipe) -> set[str]:
    """Files that `recipe` makes other than `SMALL` does."""
    build(tmp_path / "a")
    build(tmp_path / "b", recipe=recipe)
    before, after = hashes(tmp_path / "a"), hashes(tmp_path / "b")
    assert before.keys() == after.keys()
    return {name for name in before if before[name] != after[name]}


def test_what_is_recalled_by_default_changes_only_the_manifest(tmp_path: Path) -> None:
    assert changed(tmp_path, replace(SMALL, recall=RecallPolicy(budget=9))) == {"manifest.json"}


def test_the_codec_changes_the_rows_and_the_transforms_they_are_coded_in_only(tmp_path: Path) -> None:
    found = changed(tmp_path, replace(SMALL, key_codec="int4"))
    assert found == {"manifest.json", "rows.parquet", "transforms.parquet"}


def test_the_cluster_size_changes_all_but_the_tokens(tmp_path: Path) -> None:
    build(tmp_path / "a")
    every = hashes(tmp_path / "a").keys()
    assert changed(tmp_path / "both", replace(SMALL, tokens_per_cluster=5)) == every - {"tokens.parquet"}


# --- only read afterwards


def test_opening_asking_and_checking_write_nothing(tmp_path: Path) -> None:
    path = archive_of(tmp_path / "a", document=TEXT).path
    before = listing(tmp_path)
    archive = Archive.open(path, loaded("llama"))
    archive.model.model.generate(
        **archive.questions(["Who kept the book?"]),
        cache=ArchiveCache(archive, budget=8),
        max_new_tokens=4,
        do_sample=False,
    )
    assert archive.tokens.ids.shape == (archive.n_tokens,)
    verify_archive(path)
    describe_archive(path)
    assert listing(tmp_path) == before


def test_what_the_system_refuses_to_write_is_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(ConfigError, match=r"cannot write the archive .*No space left"), staging(tmp_path / "archive"):
        raise full
    assert names(tmp_path) == []
