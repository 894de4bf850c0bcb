"""Rows, codes and prototypes as ``indexes/FORMAT.md`` states them: readers written from it alone find the same."""

from __future__ import annotations

import hashlib
import struct
from itertools import accumulate
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from ragkv import Archive
from ragkv.archive import rows
from ragkv.archive.codec import Widths, pack, unpack
from ragkv.archive.files import FileEntry
from ragkv.archive.manifest import LayerEntry, read_manifest
from ragkv.archive.payload import decode_exact, encode_exact, from_bits, to_bits
from ragkv.archive.prototypes import read_centroids, write_centroids
from ragkv.archive.rows import EXACT, RowsFile, RowsWriter, rows_entry
from ragkv.recall.layers import ClusterTable, decode_rows
from tests.archives import CODED, archive_of, loaded
from tests.tiny import TEXT

LAYER = 1
GROUP_TOKENS = 32
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lossless archive with many row groups; do not change it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "GROUP_TOKENS", GROUP_TOKENS)
        return archive_of(tmp_path_factory.mktemp("built") / "a", document=TEXT).path


@pytest.fixture(scope="module")
def coded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with int4 keys, int3 values and int8 exact tokens; do not change it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "GROUP_TOKENS", GROUP_TOKENS)
        return archive_of(tmp_path_factory.mktemp("coded") / "a", document=TEXT, recipe=CODED).path


def table_of(folder: Path, index: int = LAYER) -> ClusterTable:
    found = Archive.open(folder, loaded("llama")).layers[index].clusters
    assert found is not None
    return found


# --- rows


def row_list(folder: Path) -> list[dict[str, Any]]:
    return pq.read_table(folder / "rows.parquet").to_pylist()


def row_bytes_of(folder: Path, index: int) -> int:
    """Bytes of one archived token of a layer."""
    clusters = (row for row in row_list(folder) if row["layer"] == index and row["cluster"] != EXACT)
    row = next(clusters)
    return len(row["key_value"]) // len(row["positions"])


def addresses(folder: Path) -> dict[tuple[int, int, int], tuple[int, int]]:
    """First byte and length of every cluster by layer, KV head and cluster, by the formula of FORMAT.md."""
    footer, manifest = pq.read_metadata(folder / "rows.parquet"), read_manifest(folder)
    sizes = pq.read_table(folder / "prototypes.parquet").to_pylist()
    row_bytes = {entry.index: row_bytes_of(folder, entry.index) for entry in manifest.layers}
    number, clusters = dict[tuple[int, int], int](), []
    for place, row in enumerate(sizes):
        first = number.setdefault((row["layer"], row["kv_head"]), place)
        clusters.append((row["layer"], row["kv_head"], place - first, row["size"] * row_bytes[row["layer"]]))
    n_exact = sum(entry.n_kv_heads for entry in manifest.layers if entry.exact_tokens)
    found, seen = {}, -n_exact
    for place in range(footer.num_row_groups):
        group = footer.row_group(place)
        chunk = group.column(group.num_columns - 1)
        if seen >= 0:
            own = clusters[seen : seen + group.num_rows]
            header = chunk.total_compressed_size - sum(length for *_, length in own) - 4 * group.num_rows
            assert 0 < header <= 256
            at = chunk.data_page_offset + header
            for layer, head, cluster, length in own:
                found[layer, head, cluster] = (at + 4, length)
                at += length + 4
        seen += group.num_rows
    assert seen == len(clusters)
    return found


@pytest.mark.parametrize("kind", ["built", "coded"])
def test_bytes_at_the_address_of_a_cluster_are_its_decoded_rows(kind: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(kind)
    raw, found = (folder / "rows.parquet").read_bytes(), addresses(folder)
    decoded = {(row["layer"], row["kv_head"], row["cluster"]): row["key_value"] for row in row_list(folder)}
    assert {key: raw[at : at + length] for key, (at, length) in found.items()} == {
        key: value for key, value in decoded.items() if key[2] != EXACT
    }


@pytest.mark.parametrize("kind", ["built", "coded"])
def test_an_open_archive_uses_the_addresses_of_the_format(kind: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(kind)
    for index in range(3):
        table = table_of(folder, index)
        for (layer, head, cluster), (at, length) in addresses(folder).items():
            if layer == index:
                assert int(table.address[head, cluster]) + table.first_byte == at
                assert int(table.sizes[head, cluster]) * table.row_bytes == length


def test_rows_are_the_exact_tokens_and_then_the_clusters_in_order(built: Path) -> None:
    manifest = read_manifest(built)
    exact = [(entry.index, head, EXACT) for entry in manifest.layers for head in range(entry.n_kv_heads)]
    clusters = [
        (entry.index, head, cluster)
        for entry in manifest.layers
        for head, count in enumerate(entry.clusters)
        for cluster in range(count)
    ]
    assert [(row["layer"], row["kv_head"], row["cluster"]) for row in row_list(built)] == exact + clusters


def test_row_groups_are_bounded_and_of_one_head(built: Path) -> None:
    with pq.ParquetFile(built / "rows.parquet") as file:
        groups = [file.read_row_group(place).to_pylist() for place in range(file.num_row_groups)]
    assert all(row["cluster"] == EXACT for row in groups[0])
    for group, after in zip(groups[1:], [*groups[2:], None], strict=True):
        assert len({(row["layer"], row["kv_head"]) for row in group}) == 1
        sizes = [len(row["positions"]) for row in group]
        assert sum(sizes[:-1]) < GROUP_TOKENS
        if after is not None and after[0]["cluster"] != 0:
            assert sum(sizes) >= GROUP_TOKENS


def test_checksums_of_row_groups_and_footer_cover_the_whole_file(built: Path) -> None:
    raw, footer = (built / "rows.parquet").read_bytes(), pq.read_metadata(built / "rows.parquet")
    said, at = footer.metadata[b"ragkv.row_groups.sha256"].decode(), 4
    assert raw[:at] == b"PAR1"
    for place in range(footer.num_row_groups):
        chunk = footer.row_group(place).column(footer.num_columns - 1)
        stop = chunk.data_page_offset + chunk.total_compressed_size
        assert said[64 * place : 64 * (place + 1)] == hashlib.sha256(raw[at:stop]).hexdigest()
        at = stop
    [length] = struct.unpack("<I", raw[-8:-4])
    assert at == len(raw) - 8 - length
    assert read_manifest(built).files["rows.parquet"] == FileEntry(len(raw), hashlib.sha256(raw[at:]).hexdigest())


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


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_rows_survive_decoded_and_mapped(dtype: torch.dtype, tmp_path: Path) -> None:
    n, path = 12, tmp_path / "rows.parquet"
    numbers = special_bits(dtype, n, 10)
    payload = to_bits(numbers)
    with RowsWriter(path) as writer:
        writer.add_clusters(0, [[4, 8]], torch.arange(n)[None], payload[None])
    assert b"".join(pq.read_table(path)["key_value"].to_pylist()) == payload.numpy().tobytes()
    mapped, chunk = RowsFile(path, rows_entry(path)).mapped, pq.read_metadata(path).row_group(0).column(4)
    end = chunk.data_page_offset + chunk.total_compressed_size
    raw = mapped[end - 8 * payload.shape[1] : end].view(8, -1).clone()  # an address has no alignment
    assert torch.equal(raw, payload[4:])
    assert torch.equal(to_bits(from_bits(raw, dtype)), to_bits(numbers[4:]))


def test_exact_rows_are_one_row_for_each_layer_and_head(built: Path) -> None:
    manifest = read_manifest(built)
    head, tail = manifest.head_tokens, manifest.head_tokens + manifest.archived_tokens
    positions = [*range(head), *range(tail, manifest.n_tokens)]
    exact = [row for row in row_list(built) if row["cluster"] == EXACT]
    assert len(exact) == 3 * 2
    assert all(row["positions"] == positions for row in exact)
    assert {len(row["key_value"]) for row in exact} == {len(positions) * (16 + 16) * 4}


def test_coded_exact_tokens_are_a_scale_and_a_byte_for_each_number(built: Path, coded: Path) -> None:
    lossless, short = (
        [row["key_value"] for row in row_list(folder) if row["cluster"] == EXACT] for folder in (built, coded)
    )
    for full, raw in zip(lossless, short, strict=True):
        both = np.frombuffer(full, "<f4").reshape(-1, 2, 16)
        lines = np.frombuffer(raw, np.uint8).reshape(-1, 2, 4 + 16)
        scale = np.ascontiguousarray(lines[..., :4]).view("<f4")
        numbers = np.ascontiguousarray(lines[..., 4:]).view(np.int8) * scale
        assert scale[..., 0] == pytest.approx(np.abs(both).max(-1) / 127)
        assert (np.abs(numbers - both) <= scale * 0.5001).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_codes_of_the_largest_numbers_stay_finite(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    tokens = torch.tensor([[largest, -largest, 0.0, largest / 2], [0.0, 0.0, 0.0, 0.0]], dtype=dtype)
    found = decode_exact(encode_exact(tokens, "int8"), "int8", dtype)
    assert bool(torch.isfinite(found).all())
    assert torch.equal(found[1], tokens[1])


# --- centroids


def test_a_centroid_shard_is_laid_out_as_documented() -> None:
    codes = torch.arange(15, dtype=torch.uint8).view(5, 3) * 17
    raw, d = write_centroids(codes), 6
    assert struct.unpack_from("<4siqqqBi", raw) == (b"IxSQ", d, 5, 1 << 20, 1 << 20, 1, 0)
    kind, _statistic, _argument, same_dim, n_code, n_trained = struct.unpack_from("<iifQQQ", raw, 37)
    assert (kind, same_dim, n_code, n_trained) == (1, d, 3, 2 * d)
    assert np.frombuffer(raw, "<f4", 2 * d, 73).tolist() == [-8.0] * d + [15.0] * d
    assert struct.unpack_from("<Q", raw, 73 + 8 * d) == (15,)
    assert raw[81 + 8 * d :] == codes.numpy().tobytes()
    assert torch.equal(read_centroids(raw, (5, 3)), codes)


def centroid_parts(folder: Path, head: int) -> tuple[np.ndarray, np.ndarray, Widths, slice]:
    """`key_mean`, rows of the basis and widths of a head of the layer, and which centroids of the shard are its."""
    transforms, index = pq.read_table(folder / "transforms.parquet").to_pylist(), 2 * LAYER + head
    row = transforms[index]
    assert (row["layer"], row["kv_head"]) == (LAYER, head)
    counts = [count for entry in read_manifest(folder).layers for count in entry.clusters]
    first = sum(counts[:index])
    widths = Widths(*(row[f"key_prototypes_{width}"] for width in (8, 4, 2)))
    mean = np.frombuffer(row["key_mean"], "<f4").astype(np.float64)
    return mean, bfloat16(row["key_prototypes"], 16), widths, slice(first, first + counts[index])


@pytest.mark.parametrize("head", [0, 1])
def test_faiss_decodes_a_shard_to_the_numbers_of_the_format(head: int, coded: Path) -> None:
    mean, basis, widths, own = centroid_parts(coded, head)
    index = faiss.read_index(str(coded / "centroids.faiss"))
    nibbles = index.reconstruct_n(own.start, own.stop - own.start).astype(np.float64)
    eight = nibbles[:, 0 : 2 * widths.eight : 2] + 16 * nibbles[:, 1 : 2 * widths.eight : 2]
    rest = nibbles[:, 2 * widths.eight :]
    numbers = np.concatenate([eight, rest[:, 0::2], rest[:, 1::2]], axis=1)
    table = table_of(coded)
    found = table.centroids()[head][table.sizes[head] > 0].numpy()
    assert found == pytest.approx(mean + numbers @ basis, rel=1e-5, abs=1e-5)


def test_faiss_searches_a_shard_for_the_largest_logits(coded: Path) -> None:
    mean, basis, widths, own = centroid_parts(coded, 0)
    query = np.linspace(-1, 1, 16)
    along = basis @ query
    four = along[widths.eight :].reshape(2, -1)
    columns = np.concatenate([np.stack([along[: widths.eight], 16 * along[: widths.eight]], 1).ravel(), four.T.ravel()])
    selector = faiss.SearchParameters(sel=faiss.IDSelectorRange(own.start, own.stop))
    index = faiss.read_index(str(coded / "centroids.faiss"))
    found, places = index.search(columns[None].astype(np.float32), 5, params=selector)
    table = table_of(coded)
    logits = table.centroids()[0][table.sizes[0] > 0].double().numpy() @ query - mean @ query
    assert (places[0] - own.start).tolist() == (-logits).argsort()[:5].tolist()
    assert found[0] == pytest.approx(np.sort(logits)[:-6:-1], rel=1e-4, abs=1e-4)


# --- codes


def bfloat16(raw: bytes, dim: int) -> np.ndarray:
    return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(-1, dim).astype(np.float64)


def numbers_by_hand(raw: np.ndarray, widths: tuple[int, int, int]) -> np.ndarray:
    """Coefficients (n, K) of packed levels (n, n_bytes) by the table of FORMAT.md."""
    eight, four, two = widths
    body, columns = raw.astype(int), []
    columns += [body[:, i] - 127.5 for i in range(eight)]
    for j in range(four):
        columns.append((body[:, eight + j % (four // 2)] >> 4 * (j // (four // 2)) & 15) - 7.5)
    for j in range(two):
        columns.append((body[:, eight + four // 2 + j % (two // 4)] >> 2 * (j // (two // 4)) & 3) - 1.5)
    return np.stack(columns, axis=1)


@pytest.mark.parametrize("widths", [(0, 8, 0), (2, 4, 8), (3, 0, 4), (5, 0, 0), (0, 0, 8)])
def test_levels_are_packed_as_documented(widths: tuple[int, int, int]) -> None:
    own, generator = Widths(*widths), torch.Generator().manual_seed(0)
    levels = torch.cat(
        [torch.randint(0, top, (7, n), generator=generator) for n, top in zip(widths, (256, 16, 4), strict=True)], dim=1
    ).to(torch.uint8)
    packed = pack(levels, own)
    assert packed.shape == (7, own.n_bytes)
    middles = own.per_coefficient(-127.5, -7.5, -1.5).numpy()
    assert np.array_equal(numbers_by_hand(packed.numpy(), widths), levels.numpy() + middles)
    assert torch.equal(unpack(packed, own), levels)


def scales_by_hand(code: np.ndarray) -> np.ndarray:
    return np.where(code == 0, 0.0, 2.0 ** ((code.astype(np.float64) - 128) / 8))


def decoded_by_hand(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values (n_kv_heads, n_tokens, 16) of the layer in a coded archive, from its files alone."""
    manifest = read_manifest(folder)
    entry: LayerEntry = manifest.layers[LAYER]
    transforms = [row for row in pq.read_table(folder / "transforms.parquet").to_pylist() if row["layer"] == LAYER]
    table = pq.read_table(folder / "prototypes.parquet").to_pylist()
    n_all, ends = len(table), list(accumulate(count for each in manifest.layers for count in each.clusters))
    shard = (folder / "centroids.faiss").read_bytes()
    n_code = struct.unpack_from("<Q", shard, 57)[0]
    key_codes = np.frombuffer(shard, np.uint8, n_all * n_code, len(shard) - n_all * n_code).reshape(n_all, n_code)
    keys, values = list[np.ndarray](), list[np.ndarray]()
    for head, own in enumerate(transforms):
        place = 2 * LAYER + head
        clusters = slice(ends[place] - entry.clusters[head], ends[place])
        value_codes = np.array([list(row["value_code"]) for row in table[clusters]])
        lines = [row for row in row_list(folder) if (row["layer"], row["kv_head"]) == (LAYER, head)]
        lines = [row for row in lines if row["cluster"] != EXACT]
        sizes = [len(row["positions"]) for row in lines]
        raw = np.frombuffer(b"".join(row["key_value"] for row in lines), np.uint8).reshape(sum(sizes), -1)
        of = np.repeat(np.arange(len(lines)), sizes)
        at = 0
        for name, codes, out in (("key", key_codes[clusters], keys), ("value", value_codes, values)):
            kept, token = (
                tuple(own[f"{name}_{kind}_{width}"] for width in (8, 4, 2)) for kind in ("prototypes", "rows")
            )
            mean = np.frombuffer(own[f"{name}_mean"], "<f4").astype(np.float64)
            prototypes = mean + numbers_by_hand(codes, kept) @ bfloat16(own[f"{name}_prototypes"], 16)
            stop = at + 1 + token[0] + token[1] // 2 + token[2] // 4
            residuals = numbers_by_hand(raw[:, at + 1 : stop], token) @ bfloat16(own[f"{name}_rows"], 16)
            out.append(prototypes[of] + scales_by_hand(raw[:, at])[:, None] * residuals)
            at = stop
        assert at == raw.shape[1]
    return np.stack(keys), np.stack(values)


def test_coded_rows_decode_by_the_document_alone(coded: Path) -> None:
    keys, values = decode_rows(table_of(coded))
    by_hand = decoded_by_hand(coded)
    assert keys.numpy() == pytest.approx(by_hand[0], rel=1e-5, abs=1e-5)
    assert values.numpy() == pytest.approx(by_hand[1], rel=1e-5, abs=1e-5)


def test_coded_rows_are_near_the_keys_and_values_of_the_model(built: Path, coded: Path) -> None:
    """The lossless twin holds them; the same clusters, since a codec does not move them."""
    exact = decode_rows(table_of(built))
    for found, true, most in zip(decoded_by_hand(coded), exact, (0.1, 0.35), strict=True):
        away = (true - true.mean(dim=1, keepdim=True)).numpy()
        assert np.linalg.norm(found - true.numpy()) < most * np.linalg.norm(away)


def test_a_coded_row_takes_the_bytes_of_its_codecs(coded: Path) -> None:
    assert row_bytes_of(coded, LAYER) == 1 + 8 + 1 + 6  # 4 and 3 bits for 16 numbers


def test_the_spread_of_values_is_that_of_the_tokens(built: Path) -> None:
    """Of a lossless archive, whose rows are what the model computed; a scale code is off by half an eighth octave."""
    table = table_of(built)
    _keys, values = decode_rows(table)
    for head in range(2):
        sizes = table.sizes[head][table.sizes[head] > 0].long()
        spreads = scales_by_hand(table.prototypes.spreads[head][: len(sizes), 1].numpy())
        far = (values[head] - table.transforms.value_mean[head]).double().square().sum(-1)
        assert spreads == pytest.approx(means(far, sizes).sqrt().numpy(), rel=0.05)


def means(column: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Mean of a column (n_tokens,) over the tokens of each cluster."""
    return torch.stack([part.mean() for part in column.split(sizes.tolist())])
