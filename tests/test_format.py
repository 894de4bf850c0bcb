"""The format as ``indexes/FORMAT.md`` states it: readers written from that text alone find what was written."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from ragkv import Archive, PromptLayout, RagkvError, Recipe, build_archive, rows
from ragkv.errors import ArchiveCorruptError, ArchiveFormatError
from ragkv.faiss_io import read_centroids, write_centroids
from ragkv.fingerprint import tokenizer_sha256, weights_sha256
from ragkv.manifest import read_manifest
from ragkv.rows import EXACT, Rows, map_file, read_rows, row_groups, write_rows
from ragkv.tables import write_prototypes
from ragkv.verify import verify_archive
from tests.archives import SMALL, archive_of, loaded
from tests.forge import edit_manifest
from tests.tiny import TEXT

INDEXES = Path(__file__).resolve().parent.parent / "indexes"
GROUP_ROWS = 32
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive with many row groups; do not change it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "ROW_GROUP_ROWS", GROUP_ROWS)
        return archive_of(tmp_path_factory.mktemp("built") / "a", document=TEXT).path


@pytest.fixture
def folder(built: Path, tmp_path: Path) -> Path:
    """A copy of it to damage."""
    return shutil.copytree(built, tmp_path / "a")


# --- manifest


def leaves(value: object, name: str = "") -> set[str]:
    """Names of all fields as FORMAT.md writes them; entries of `layers` by their own name."""
    if name in ("model.rope_parameters", "recipe.asked") or not isinstance(value, dict):
        return {name}
    if name == "files":
        return {f"files.*.{key}" for entry in value.values() for key in entry}
    found = set()
    for key, inner in value.items():
        if key == "layers":
            found |= {"layers"}.union(*inner)
        else:
            found |= leaves(inner, f"{name}.{key}" if name else key)
    return found


def test_every_field_of_the_manifest_is_documented(built: Path) -> None:
    text = (INDEXES / "FORMAT.md").read_text(encoding="utf-8")
    body = json.loads((built / "manifest.json").read_text(encoding="utf-8"))
    assert [name for name in sorted(leaves(body)) if f"`{name}`" not in text] == []


def canonical(value: object) -> str:
    """Canonical JSON by the rules of FORMAT.md, for what a manifest holds."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{canonical(key)}: {canonical(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(canonical, value)) + "]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if not isinstance(value, str):
        return repr(value)
    short = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}

    def escaped(char: str) -> str:
        units = struct.unpack(f">{len(char.encode('utf-16-be')) // 2}H", char.encode("utf-16-be"))
        return short.get(char) or (char if " " <= char <= "~" else "".join(f"\\u{unit:04x}" for unit in units))

    return '"' + "".join(map(escaped, value)) + '"'


def test_the_checksum_of_the_manifest_is_that_of_its_canonical_json(tmp_path: Path) -> None:
    name = 'caf\u00e9 \U0001f600 "\\\t\x07\x7f\n'
    build_archive(loaded("llama"), TEXT, tmp_path / "a", recipe=SMALL, layout=PromptLayout.plain(), document_name=name)
    body = json.loads((tmp_path / "a" / "manifest.json").read_text(encoding="utf-8"))
    stated = body.pop("sha256")
    assert body["document"]["name"] == name
    assert hashlib.sha256(canonical(body).encode("ascii")).hexdigest() == stated


def refused(folder: Path, kind: type[RagkvError], match: str) -> None:
    with pytest.raises(kind, match=match):
        Archive.open(folder, loaded("llama"))
    [fault] = verify_archive(folder)
    assert "manifest.json: " in fault


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_another_version_is_refused(version: object, folder: Path) -> None:
    edit_manifest(folder, lambda body: body.__setitem__("version", version))
    refused(folder, ArchiveFormatError, f"format version {version!r}, this release reads 1")


def test_another_format_is_refused(folder: Path) -> None:
    edit_manifest(folder, lambda body: body.__setitem__("format", "zip"))
    refused(folder, ArchiveFormatError, "not a ragkv-archive manifest")


def test_an_edited_field_is_refused(folder: Path) -> None:
    edit_manifest(folder, lambda body: body["model"].__setitem__("name", "other"), checksum=False)
    refused(folder, ArchiveCorruptError, "its own checksum does not hold")


@pytest.mark.parametrize(
    "text", ["", "{", "[]\n", "null\n", "{}\n", "[" * 100_000 + "}\n", '{"a": 1}\n\n', "\ufeff{}\n"]
)
def test_other_text_is_refused(text: str, folder: Path) -> None:
    (folder / "manifest.json").write_text(text, encoding="utf-8")
    refused(folder, RagkvError, "manifest.json: ")


@pytest.mark.parametrize("place", ["", "model", "layout", "seams", "document", "counts", "recipe", "layers.0"])
def test_an_unknown_field_is_refused(place: str, folder: Path) -> None:
    edit_manifest(folder, lambda body: at(body, place).__setitem__("extra", 1))
    refused(folder, ArchiveFormatError, "field")


@pytest.mark.parametrize(
    ("place", "values"),
    [
        ("counts.prefix_tokens", [21.0, True, -1, "21", None, 10**30]),
        ("counts.archived_tokens", [1.5, [], {}]),
        ("layers", [{}, None, [1]]),
        ("layers.1.clusters", [[1], None, 5, [33.0, 33.0], [-1, 1], "ab"]),
        ("layers.1.n_kv_heads", [2.0, "2", None]),
        ("layers.1.window", [1.0, "24", -1]),
        ("layers.1.index", ["1", 1.0, None, -1]),
        ("files", [{}, None, [], "x"]),
        ("files.tokens\\.parquet", [{}, None, {"sha256": 1, "bytes": 1}, {"sha256": "", "bytes": "1"}]),
        ("model.dtype", ["int8", "float64", None, 3]),
        ("model.rope_parameters", [[], "x", None]),
        ("model.name", [None, 1]),
        ("layout.question", ["no slot", 1, None]),
        ("layout.stop", ["\n", [1], None]),
        ("seams.prefix", [1, "no", None]),
        ("recipe.asked", [{}, None, {"seed": "x"}]),
        ("recipe.built.clusters_min", [0, "x"]),
        ("document.sha256", [None, 7]),
    ],
)
def test_a_field_of_the_wrong_kind_is_refused(place: str, values: list[object], folder: Path) -> None:
    whole = (folder / "manifest.json").read_text(encoding="utf-8")
    *parents, last = keys(place)
    for value in values:
        (folder / "manifest.json").write_text(whole, encoding="utf-8")
        edit_manifest(folder, lambda body, value=value: walk(body, parents).__setitem__(last, value))
        with pytest.raises(ArchiveFormatError):
            Archive.open(folder, loaded("llama"))
        assert len(verify_archive(folder)) == 1


def keys(place: str) -> list[str | int]:
    names = [name.replace("\0", ".") for name in place.replace("\\.", "\0").split(".") if name]
    return [int(name) if name.isdigit() else name for name in names]


def walk(body: Any, names: list[str | int]) -> Any:
    for name in names:
        body = body[name]
    return body


def at(body: Any, place: str) -> Any:
    return walk(body, keys(place))


def test_paths_outside_the_archive_are_refused(folder: Path) -> None:
    edit_manifest(folder, lambda body: body["files"].__setitem__("../../secret", {"sha256": "0", "bytes": 1}))
    refused(folder, ArchiveFormatError, "disagree on '../../secret'")


# --- rows


def addresses(path: Path, sizes: list[list[int]], row_bytes: int) -> list[list[int]]:
    """Byte address of every cluster, by the formula of FORMAT.md."""
    footer = pq.read_metadata(path)
    first_byte, first_row, seen = [], [], 0
    for number in range(1, footer.num_row_groups):
        group = footer.row_group(number)
        chunk = group.column(3)
        header = chunk.total_compressed_size - group.num_rows * row_bytes
        assert 0 < header <= 256
        first_byte.append(chunk.data_page_offset + header)
        first_row.append(seen)
        seen += group.num_rows
    found, before = [], 0
    for head in sizes:
        found.append([])
        for size in head:
            group = max(g for g, first in enumerate(first_row) if first <= before)
            found[-1].append(first_byte[group] + (before - first_row[group]) * row_bytes)
            before += size
    return found


def cluster_sizes(folder: Path, layer: int) -> list[list[int]]:
    table = pq.read_table(folder / f"layers/{layer:03d}.prototypes.parquet").to_pydict()
    sizes: list[list[int]] = [[] for _ in range(max(table["kv_head"]) + 1)]
    for head, size in zip(table["kv_head"], table["size"], strict=True):
        sizes[head].append(size)
    return sizes


def test_bytes_at_the_address_of_a_cluster_are_its_decoded_rows(built: Path) -> None:
    path, sizes = built / "layers/001.rows.parquet", cluster_sizes(built, 1)
    decoded = pq.read_table(path).to_pydict()
    raw, row_bytes = path.read_bytes(), 128
    for head, starts in enumerate(addresses(path, sizes, row_bytes)):
        for cluster, start in enumerate(starts):
            mine = zip(decoded["kv_head"], decoded["cluster"], decoded["key_value"], strict=True)
            expected = b"".join(row for h, c, row in mine if (h, c) == (head, cluster))
            assert raw[start : start + sizes[head][cluster] * row_bytes] == expected


def test_an_open_archive_uses_the_addresses_of_the_format(built: Path) -> None:
    tables = Archive.open(built, loaded("llama")).layers[1].recall
    assert tables is not None
    sizes = cluster_sizes(built, 1)
    for head, starts in enumerate(addresses(built / "layers/001.rows.parquet", sizes, 128)):
        assert tables.address[head, : len(starts)].tolist() == starts


def test_row_groups_are_bounded_and_hold_whole_clusters_of_one_head(built: Path) -> None:
    path, sizes = built / "layers/001.rows.parquet", cluster_sizes(built, 1)
    with pq.ParquetFile(path) as file:
        assert file.num_row_groups > 4
        groups = [file.read_row_group(number) for number in range(1, file.num_row_groups)]
    runs = [list(zip(group["kv_head"].to_pylist(), group["cluster"].to_pylist(), strict=True)) for group in groups]
    assert all(len({head for head, _ in run}) == 1 for run in runs)
    assert all(len(run) < GROUP_ROWS + max(map(max, sizes)) for run in runs)
    assert all(left[-1] != right[0] for left, right in pairwise(runs))


def special_bits(dtype: torch.dtype, n_rows: int, dim: int) -> torch.Tensor:
    """-0.0, the smallest subnormals and the largest numbers among ordinary ones, (n_rows, dim)."""
    info = torch.finfo(dtype)
    smallest = info.smallest_normal * info.eps
    odd = torch.tensor([-0.0, 0.0, smallest, -smallest, info.smallest_normal / 2, info.max, info.min], dtype=dtype)
    assert bool((odd[2:4] != 0).all())
    numbers = torch.linspace(-3, 3, n_rows * dim).to(dtype)
    numbers[: len(odd)] = odd
    numbers[-len(odd) :] = odd
    return numbers.reshape(n_rows, dim)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_rows_survive_decoded_and_mapped(dtype: torch.dtype, tmp_path: Path) -> None:
    n, path = 12, tmp_path / "rows.parquet"
    ids = torch.arange(n)
    archived = Rows(ids * 0, ids // 4, ids, special_bits(dtype, n, 4), special_bits(dtype, n, 6))
    exact = Rows(ids * 0, ids * 0 + EXACT, ids, special_bits(dtype, n, 4), special_bits(dtype, n, 6))
    write_rows(path, exact, archived, [[4, 4, 4]])
    for exact_only, start in ((False, n), (True, 0)):
        found = read_rows(path, 4, dtype, exact_only=exact_only)
        assert bits(found.keys[start:]) == bits(archived.keys)
        assert bits(found.values[start:]) == bits(archived.values)
    row_bytes = 10 * dtype.itemsize
    [first] = row_groups(path, row_bytes).first_byte
    mapped = map_file(path)[first : first + n * row_bytes].numpy().tobytes()
    assert mapped == bits(torch.cat([archived.keys, archived.values], dim=1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_mean_values_survive(dtype: torch.dtype, tmp_path: Path) -> None:
    means = special_bits(dtype, 12, 6)
    used, ones = torch.ones(2, 6, dtype=torch.bool), torch.ones(2, 6)
    write_prototypes(tmp_path / "p", used, ones.long(), ones, ones, means.view(2, 6, 6))
    assert b"".join(pq.read_table(tmp_path / "p")["mean_value"].to_pylist()) == bits(means)


# --- centroids


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_centroids_survive(dtype: torch.dtype, tmp_path: Path) -> None:
    centroids = special_bits(dtype, 12, 4)
    write_centroids(tmp_path / "c.faiss", centroids)
    assert bits(read_centroids(tmp_path / "c.faiss", (12, 4), dtype)) == bits(centroids)


@pytest.mark.parametrize(
    ("dtype", "kind", "quantiser"),
    [(torch.float32, b"IxFI", None), (torch.bfloat16, b"IxSQ", 7), (torch.float16, b"IxSQ", 4)],
)
def test_a_centroid_shard_is_laid_out_as_documented(
    dtype: torch.dtype, kind: bytes, quantiser: int | None, tmp_path: Path
) -> None:
    n, dim = 5, 6
    centroids = torch.linspace(-2, 2, n * dim).to(dtype).reshape(n, dim)
    write_centroids(tmp_path / "c.faiss", centroids)
    raw = (tmp_path / "c.faiss").read_bytes()
    assert struct.unpack_from("<4siqqqBi", raw) == (kind, dim, n, 1 << 20, 1 << 20, 1, 0)
    n_head = 37
    if quantiser is not None:
        found = struct.unpack_from("<iifQQQ", raw, n_head)
        assert (found[0], *found[3:]) == (quantiser, dim, 2 * dim, 0)
        n_head += struct.calcsize("<iifQQQ")
    [length] = struct.unpack_from("<Q", raw, n_head)
    assert length == n * dim * (1 if quantiser is None else 2)
    assert n_head + 8 == (45 if quantiser is None else 81)
    assert raw[n_head + 8 :] == bits(centroids)


# --- fingerprint, tokens, recipe


def test_the_hash_of_the_weights_is_as_documented() -> None:
    model, total = loaded("gemma2").model, hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        numbers = np.ascontiguousarray(tensor.to(torch.float16).numpy())
        entry = hashlib.sha256(f"{name} {tuple(tensor.shape)} torch.float16".encode())
        entry.update(numbers.tobytes())
        total.update(entry.digest())
    assert weights_sha256(model, torch.float16) == total.hexdigest()


def test_the_hash_of_the_tokenizer_is_as_documented() -> None:
    tokenizer = loaded("llama").tokenizer
    page = (Path(__file__).resolve().parent.parent / "indexes" / "FORMAT.md").read_text(encoding="utf-8")
    probes = json.loads(page.split("The probe texts, as JSON:\n\n```json\n")[1].split("\n```")[0])
    cuts = [tokenizer.backend_tokenizer.encode(probe, add_special_tokens=False).ids for probe in probes]
    hashed = canonical([[list(entry) for entry in sorted(tokenizer.get_vocab().items())], *cuts])
    assert tokenizer_sha256(tokenizer) == hashlib.sha256(hashed.encode()).hexdigest()


def test_offsets_cut_the_document_into_its_tokens(built: Path) -> None:
    table, n_prefix = pq.read_table(built / "tokens.parquet").to_pydict(), read_manifest(built).prefix_tokens
    assert table["start"][:n_prefix] == table["end"][:n_prefix] == [-1] * n_prefix
    pieces = {(start, end) for start, end in zip(table["start"], table["end"], strict=True) if start >= 0}
    assert "".join(TEXT[start:end] for start, end in sorted(pieces)) == TEXT


def test_the_default_recipe_file_lists_every_key_with_its_default() -> None:
    path = INDEXES / "recipes" / "default.toml"
    assert Recipe.from_toml(path) == Recipe()
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    assert "\n".join(lines) + "\n" == Recipe().to_toml()
