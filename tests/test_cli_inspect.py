"""``ragkv verify`` and ``ragkv inspect`` as a user sees them, and what `describe_archive` says."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ragkv.archive.inspect import describe_archive
from ragkv.archive.manifest import read_manifest
from ragkv.cli.app import main
from tests.archives import archive_of
from tests.tiny import TEXT


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small archive of the tiny Llama; do not change it."""
    return archive_of(tmp_path_factory.mktemp("built") / "a", document=TEXT).path


@pytest.fixture
def folder(built: Path, tmp_path: Path) -> Path:
    """A copy of it to damage."""
    return shutil.copytree(built, tmp_path / "a")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run ``ragkv`` in this process; gives exit code, stdout and stderr."""

    def call(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ragkv", *map(str, args)])
        with pytest.raises(SystemExit) as caught:
            main()
        captured = capsys.readouterr()
        return caught.value.code, captured.out, captured.err

    return call


def test_verify_prints_that_an_archive_is_sound(run: Callable, built: Path) -> None:
    assert run("verify", built) == (0, f"{built}: sound\n", "")


def test_verify_prints_one_line_per_fault(run: Callable, folder: Path, built: Path) -> None:
    (folder / "extra").touch()
    assert run("verify", folder, built) == (1, f"{folder}: extra: not in the manifest\n{built}: sound\n", "")


def test_verify_writes_one_json_object(run: Callable, folder: Path, built: Path) -> None:
    (folder / "extra").touch()
    code, out, err = run("verify", folder, built, "--json")
    assert (code, err) == (1, "")
    assert json.loads(out) == {
        "sound": False,
        "archives": [
            {"path": str(folder), "sound": False, "faults": ["extra: not in the manifest"]},
            {"path": str(built), "sound": True, "faults": []},
        ],
    }


def test_verify_goes_on_after_a_folder_without_an_archive(run: Callable, tmp_path: Path, built: Path) -> None:
    code, out, err = run("verify", tmp_path / "nothing", built)
    assert (code, out) == (2, f"{built}: sound\n")
    assert err.startswith("error: no archive in ")


def test_inspect_shows_document_layers_and_bytes(run: Callable, built: Path) -> None:
    code, out, err = run("inspect", built)
    assert (code, err) == (0, "")
    assert "tiny-llama (llama, float32)" in out
    assert "disk over dense" in out
    assert sum("global" in line and " / " in line for line in out.splitlines()) == 3


def test_inspect_writes_what_describe_archive_gives(run: Callable, built: Path) -> None:
    code, out, err = run("inspect", built, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == describe_archive(built)


def test_inspect_of_nothing_is_one_line(run: Callable, tmp_path: Path) -> None:
    code, out, err = run("inspect", tmp_path / "nothing")
    assert (code, out, err.count("\n")) == (2, "", 1)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_described_bytes_are_those_of_the_open_archive(name: str, tmp_path: Path) -> None:
    archive = archive_of(tmp_path / "a", model=name, document=TEXT)
    described = describe_archive(archive.path)
    assert described["dense_bytes"] == archive.dense_bytes
    assert described["bytes"]["total"] == archive.disk_bytes
    assert described["bytes"]["total"] == sum(entry.bytes for entry in archive.manifest.files.values())


def test_described_clusters_are_those_of_the_manifest(built: Path) -> None:
    manifest, layer = read_manifest(built), describe_archive(built)["layers"][1]
    counts = manifest.layers[1].clusters
    assert layer["clusters"] == {"min": min(counts), "mean": sum(counts) / len(counts), "max": max(counts)}
    assert layer["cluster_size"]["min"] >= 1
    assert layer["kind"] == "global"


def test_the_manifest_names_exactly_the_files_there_are(built: Path) -> None:
    manifest = read_manifest(built)
    found = {path.relative_to(built).as_posix(): path for path in built.rglob("*") if path.is_file()}
    del found["manifest.json"]
    assert manifest.files.keys() == found.keys()
    assert all(entry.bytes == found[name].stat().st_size for name, entry in manifest.files.items())
