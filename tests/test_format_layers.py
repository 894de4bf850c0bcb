"""The files of a layer as ``indexes/FORMAT.md`` states them: readers written from that text alone find the same."""

from __future__ import annotations

import struct
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from ragkv import Archive
from ragkv.archive import rows
from ragkv.archive.centroids import read_centroids, write_centroids
from ragkv.archive.manifest import read_manifest
from ragkv.archive.payload import from_bits, to_bits
from ragkv.archive.rows import EXACT, Rows, map_file, read_rows, row_groups, write_rows
from ragkv.recall.layers import decode_rows, mean_values
from tests.archives import CODED, archive_of, loaded
from tests.tiny import TEXT

GROUP_ROWS = 32
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lossless archive with many row groups; do not change it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "ROW_GROUP_ROWS", GROUP_ROWS)
        return archive_of(tmp_path_factory.mktemp("built") / "a", document=TEXT).path


@pytest.fixture(scope="module")
def coded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with int4 keys and int3 values; do not change it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "ROW_GROUP_ROWS", GROUP_ROWS)
        return archive_of(tmp_path_factory.mktemp("coded") / "a", document=TEXT, recipe=CODED).path


# --- rows


def addresses(path: Path, sizes: list[list[int]], row_bytes: int) -> list[list[int]]:
    """Byte address of every cluster, by the formula of FORMAT.md."""
    footer = pq.read_metadata(path)
    first_byte, first_row, seen = [], [], 0
    for number in range(footer.num_row_groups):
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
        groups = [file.read_row_group(number) for number in range(file.num_row_groups)]
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
    payload = to_bits(special_bits(dtype, n, 10))
    write_rows(path, Rows(ids * 0, ids // 4, ids, payload), [[4, 4, 4]])
    assert torch.equal(read_rows(path).payload, payload)
    [first] = row_groups(path, 10 * dtype.itemsize).first_byte
    assert bits(map_file(path)[first : first + payload.numel()]) == bits(payload)
    assert bits(from_bits(payload, dtype)) == bits(payload)


def test_exact_rows_are_one_row_for_each_head_and_token(built: Path) -> None:
    table, manifest = pq.read_table(built / "layers/001.exact.parquet").to_pydict(), read_manifest(built)
    head, tail = manifest.head_tokens, manifest.head_tokens + manifest.archived_tokens
    positions = [*range(head), *range(tail, manifest.n_tokens)]
    assert table["kv_head"] == [0] * len(positions) + [1] * len(positions)
    assert table["position"] == positions * 2
    assert set(table["cluster"]) == {EXACT}
    assert {len(row) for row in table["key_value"]} == {(16 + 16) * 4}


# --- centroids


def centroids_by_hand(raw: bytes, n: int, dim: int) -> np.ndarray:
    """Decode a centroid shard by the table of FORMAT.md: (n, dim) float32."""
    assert struct.unpack_from("<4siqqqBi", raw) == (b"IxSQ", dim, n, 1 << 20, 1 << 20, 1, 0)
    kind, _statistic, _argument, same_dim, n_code, n_trained = struct.unpack_from("<iifQQQ", raw, 37)
    assert (kind, same_dim, n_code, n_trained) == (0, dim, dim, 2 * dim)
    low, width = np.frombuffer(raw, "<f4", 2 * dim, 73).reshape(2, dim)
    [length] = struct.unpack_from("<Q", raw, 73 + 8 * dim)
    assert length == n * dim == len(raw) - (81 + 8 * dim)
    codes = np.frombuffer(raw, np.uint8, n * dim, 81 + 8 * dim).reshape(n, dim)
    return low + (codes.astype(np.float32) + np.float32(0.5)) / np.float32(255) * width


def test_a_centroid_shard_is_laid_out_as_documented(tmp_path: Path) -> None:
    centroids = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    write_centroids(tmp_path / "c.faiss", centroids)
    found = centroids_by_hand((tmp_path / "c.faiss").read_bytes(), 5, 6)
    assert np.array_equal(found, read_centroids(tmp_path / "c.faiss", (5, 6)).numpy())
    half_step = (centroids.amax(0) - centroids.amin(0)) / 510
    assert bool(((torch.from_numpy(found) - centroids).abs() <= half_step * (1 + 1e-4) + 1e-6).all())


def test_faiss_searches_a_shard_by_the_numbers_that_it_decodes_to(tmp_path: Path) -> None:
    import faiss

    write_centroids(tmp_path / "c.faiss", torch.randn(50, 6, generator=torch.Generator().manual_seed(1)))
    index = faiss.read_index(str(tmp_path / "c.faiss"))
    query = np.ones((1, 6), dtype=np.float32)
    products = read_centroids(tmp_path / "c.faiss", (50, 6)).numpy() @ query[0]
    found, places = index.search(query, 5)
    assert places[0].tolist() == (-products).argsort()[:5].tolist()
    assert found[0] == pytest.approx(np.sort(products)[:-6:-1], rel=1e-4)


# --- coded rows


def column(folder: Path, file: str, name: str) -> np.ndarray:
    """A fixed-size binary column of layer 1 as (n_rows, n_bytes) uint8."""
    values = pq.read_table(folder / f"layers/001.{file}.parquet")[name].to_pylist()
    return np.frombuffer(b"".join(values), dtype=np.uint8).reshape(len(values), -1)


def residuals_by_hand(coded: np.ndarray, basis: np.ndarray, widths: tuple[int, ...], dim: int) -> np.ndarray:
    """Decode the coded tensor of some tokens of one KV head by the rules of FORMAT.md: (n, dim) float64."""
    eight, four, two = widths
    scale = np.where(coded[:, 0] == 0, 0.0, 2.0 ** ((coded[:, 0].astype(np.float64) - 128) / 8))
    bytes8, bytes4, bytes2 = np.split(coded[:, 1:].astype(int), [eight, eight + four // 2], axis=1)
    assert bytes2.shape[1] == two // 4
    coefficients = [bytes8[:, place] - 127.5 for place in range(eight)]
    coefficients += [(bytes4[:, place // 2] >> 4 * (place % 2) & 15) - 7.5 for place in range(four)]
    coefficients += [(bytes2[:, place // 4] >> 2 * (place % 4) & 3) - 1.5 for place in range(two)]
    upper = np.frombuffer(basis.tobytes(), dtype="<u2").astype(np.uint32) << 16  # bfloat16
    rows_of_head = upper.view(np.float32).reshape(len(coefficients), dim).astype(np.float64)
    return (np.stack(coefficients, axis=1) * scale[:, None]) @ rows_of_head


def decoded_by_hand(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values (n_kv_heads, n_tokens, 16) of layer 1 of a coded float32 archive, from its files alone."""
    layer, table = read_manifest(folder).layers[1], pq.read_table(folder / "layers/001.rows.parquet")
    head, cluster = table["kv_head"].to_numpy(), table["cluster"].to_numpy()
    raw = column(folder, "rows", "key_value")
    eight, four, two = layer.key_widths
    n_key = 1 + eight + four // 2 + two // 4
    shard = (folder / "layers/001.centroids.faiss").read_bytes()
    relative = np.split(centroids_by_hand(shard, sum(layer.clusters), 16), np.cumsum(layer.clusters)[:-1])
    key_mean, value_mean = (column(folder, "bases", name).view("<f4") for name in ("key_mean", "value_mean"))
    key_rows, value_rows = (column(folder, "bases", name) for name in ("key_rows", "value_rows"))
    keys, values = [], []
    for h in range(2):
        mine = raw[head == h]
        centroids = relative[h] + key_mean[h]
        own = residuals_by_hand(mine[:, :n_key], key_rows[h], layer.key_widths, 16)
        keys.append(centroids[cluster[head == h]] + own)
        values.append(value_mean[h] + residuals_by_hand(mine[:, n_key:], value_rows[h], layer.value_widths, 16))
    return np.stack(keys), np.stack(values)


def test_coded_rows_decode_by_the_document_alone(coded: Path) -> None:
    layer = Archive.open(coded, loaded("llama")).layers[1]
    assert layer.recall is not None
    keys, values = decode_rows(layer.recall, layer.keys[:, : layer.recall.n_clusters])
    by_hand = decoded_by_hand(coded)
    assert keys.numpy() == pytest.approx(by_hand[0], rel=1e-5, abs=1e-5)
    assert values.numpy() == pytest.approx(by_hand[1], rel=1e-5, abs=1e-5)


def test_mean_values_are_those_of_the_decoded_rows(coded: Path) -> None:
    table = Archive.open(coded, loaded("llama")).layers[1].recall
    assert table is not None
    means, (_keys, values) = mean_values(table).numpy(), decoded_by_hand(coded)
    for head, sizes in enumerate(cluster_sizes(coded, 1)):
        ends = np.cumsum(sizes)
        for place, (start, end) in enumerate(zip(ends - sizes, ends, strict=True)):
            assert means[head, place] == pytest.approx(values[head, start:end].mean(0), rel=1e-5, abs=1e-5)


def test_coded_rows_are_near_the_keys_and_values_of_the_model(built: Path, coded: Path) -> None:
    """The lossless twin holds them; the same clusters, since a codec does not move them."""
    exact = column(built, "rows", "key_value").view("<f4").reshape(2, -1, 32)
    for found, true, most in zip(decoded_by_hand(coded), np.split(exact, 2, axis=2), (0.1, 0.35), strict=True):
        assert np.linalg.norm(found - true) < most * np.linalg.norm(true - true.mean(axis=1, keepdims=True))


def test_a_coded_row_takes_the_bytes_of_its_widths(coded: Path) -> None:
    layer = read_manifest(coded).layers[1]
    n_bytes = [1 + eight + four // 2 + two // 4 for eight, four, two in (layer.key_widths, layer.value_widths)]
    assert column(coded, "rows", "key_value").shape[1] == sum(n_bytes)
    assert n_bytes == [1 + 8, 1 + 6]  # 4 and 3 bits for 16 numbers
    path, sizes = coded / "layers/001.rows.parquet", cluster_sizes(coded, 1)
    tables = Archive.open(coded, loaded("llama")).layers[1].recall
    assert tables is not None
    for head, starts in enumerate(addresses(path, sizes, sum(n_bytes))):
        assert tables.address[head, : len(starts)].tolist() == starts
