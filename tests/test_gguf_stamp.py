"""A GGUF file is hashed once, however often it is loaded, for as long as it is the same file."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest

from ragkv.errors import ConfigError
from ragkv.model import gguf
from ragkv.model.gguf import convert_gguf, gguf_config
from ragkv.model.load import load_model
from tests.test_gguf_cache import write_gguf
from tests.tiny import tiny_model


@pytest.fixture
def file(tmp_path: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A converted file that counts as settled."""
    monkeypatch.setattr(gguf, "SETTLED_S", -1.0)
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("qwen2"))
    convert_gguf(path)
    return path


@pytest.fixture
def hashed(file: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The checksum of every file that is hashed from now on."""
    found: list[str] = []
    real = hashlib.file_digest

    def counted(*words: object) -> object:
        digest = real(*words)
        found.append(digest.hexdigest())
        return digest

    monkeypatch.setattr(hashlib, "file_digest", counted)
    return found


def test_a_second_load_does_not_hash_again(file: Path, hashed: list[str]) -> None:
    model = load_model(str(file), device="cpu")
    gguf_config(file)
    assert hashed == []
    os.link(file, file.with_name("linked.gguf"))  # another name of the file changes its times: no harm, it is hashed
    convert_gguf(file.with_name("linked.gguf"))
    assert len(hashed) == 1
    assert model.name == str(file)


def test_another_file_under_the_name_is_hashed(file: Path, hashed: list[str], tmp_path: Path) -> None:
    before = convert_gguf(file)
    other = write_gguf(tmp_path / "other.gguf", tiny_model("qwen2", seed=1))
    assert other.stat().st_size == file.stat().st_size
    times = file.stat()
    os.replace(other, file)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # as cp -p and rsync -t do
    assert convert_gguf(file) != before
    assert len(hashed) == 1


def test_a_file_that_is_written_over_is_hashed(file: Path, hashed: list[str], tmp_path: Path) -> None:
    before, times = convert_gguf(file), file.stat()
    other = write_gguf(tmp_path / "other.gguf", tiny_model("qwen2", seed=1))
    file.write_bytes(other.read_bytes())
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert convert_gguf(file) != before
    assert len(hashed) == 1


def test_a_file_that_was_just_written_is_not_trusted(
    file: Path, hashed: list[str], cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf, "SETTLED_S", 3600.0)
    shutil.rmtree(cache_folder / "gguf")
    for n_hashed in (1, 2):
        convert_gguf(file)
        assert len(hashed) == n_hashed


@pytest.mark.parametrize("kept", ["", "[1]", "{}", '{"stamp": [], "sha256": "a"}', "not a hash"])
def test_a_damaged_entry_is_no_entry(kept: str, file: Path, hashed: list[str], cache_folder: Path) -> None:
    before = convert_gguf(file)
    entry = next((cache_folder / "gguf").iterdir())
    right = json.loads(entry.read_text())
    assert str(file.parent) not in entry.read_text(), "no path of this machine"
    entry.write_text(json.dumps({**right, "sha256": kept}) if kept == "not a hash" else kept)
    assert convert_gguf(file) == before
    assert len(hashed) == 1
    assert json.loads(entry.read_text()) == right


def test_a_cache_that_cannot_keep_the_checksum_costs_time_only(
    file: Path, hashed: list[str], cache_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.rmtree(cache_folder / "gguf")
    (cache_folder / "gguf").write_text("a file in the way")
    convert_gguf(file)
    assert len(hashed) == 1
    assert "cannot be kept" in caplog.text


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiny.gguf"

    def refuse(*_: object) -> list[int]:
        raise OSError(5, "Input/output error")

    path.write_bytes(b"GGUF")
    monkeypatch.setattr(gguf, "_stamp", refuse)
    with pytest.raises(ConfigError, match=r"model 'tiny\.gguf' cannot be read: Input/output error"):
        convert_gguf(path)
