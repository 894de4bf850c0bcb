"""The byte accounting against values computed by hand."""

import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GptOssConfig, LlamaConfig, Qwen3Config

from ragkv import Archive, LoadedModel, PromptLayout, attach, build_archive
from ragkv.errors import ConfigError
from ragkv.evaluation.bench import cut_text
from ragkv.ledger.ledger import (
    ArchiveBytes,
    KVBytes,
    LedgerRow,
    archive_bytes,
    build_ledger,
    count_parameters,
    kv_bytes,
    kv_bytes_per_token,
    parse_size,
    plain_layers,
    weight_bytes,
)
from ragkv.ledger.plot import plot_ledger
from ragkv.model.shape import dtype_bytes, model_shape
from ragkv.recipe import Recipe
from tests.archives import DOCUMENT
from tests.tiny import tiny_config, tiny_tokenizer

GIB = 2**30


def llama_layers(n_kv_heads=32):
    config = LlamaConfig(
        num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=n_kv_heads, hidden_size=4096, head_dim=128
    )
    return model_shape(config).layers


def gemma_layers():
    config = Gemma3TextConfig(
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        sliding_window=512,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
    )
    return model_shape(config).layers


def gpt_oss_layers():
    config = GptOssConfig(num_hidden_layers=4, num_key_value_heads=8, head_dim=64, sliding_window=128)
    return model_shape(config).layers


def tiny_qwen(**overrides):
    return Qwen3Config(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        **overrides,
    )


def row(kv, *, weights=None, gpu_memory=None, resident=0):
    return LedgerRow(
        n_tokens=1000,
        kv=KVBytes(logical=kv, allocated=kv),
        archive=ArchiveBytes(n_clusters=1, resident=resident, on_disk=kv),
        weights=weights,
        gpu_memory=gpu_memory,
    )


def test_the_textbook_model_takes_512_kib_a_token_and_16_gib_at_32768():
    assert kv_bytes_per_token(llama_layers(), value_bytes=2) == 524288
    assert kv_bytes(llama_layers(), 32768, value_bytes=2) == KVBytes(logical=16 * GIB, allocated=16 * GIB)


def test_plain_layers_are_those_of_the_configuration():
    assert plain_layers(n_layers=32, n_kv_heads=32, head_dim=128) == llama_layers()


def test_kv_scales_with_kv_heads_and_not_with_query_heads():
    assert kv_bytes_per_token(llama_layers(n_kv_heads=8), value_bytes=2) == 524288 // 4


def test_an_explicit_head_dim_wins_over_hidden_size_by_heads():
    config = Qwen3Config(
        hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128
    )
    # 2 x 28 layers x 8 heads x 128 dims x 2 bytes; hidden size over heads would be 64 dims.
    assert kv_bytes_per_token(model_shape(config).layers, value_bytes=2) == 114688


@pytest.mark.parametrize(
    ("n_tokens", "sliding_tokens"),
    [(1, 1), (300, 300), (511, 511), (512, 511), (2048, 511)],
)
def test_gemma_sliding_layers_hold_at_most_window_minus_one(n_tokens, sliding_tokens):
    token = 2 * 256 * 2
    assert kv_bytes(gemma_layers(), n_tokens, value_bytes=2) == KVBytes(
        logical=(n_tokens + 5 * sliding_tokens) * token, allocated=6 * n_tokens * token
    )


def test_gpt_oss_alternates_sliding_and_global_layers():
    # (2 x 1000 + 2 x 127) tokens x 8 heads x 256 bytes
    assert kv_bytes(gpt_oss_layers(), 1000, value_bytes=2) == KVBytes(logical=4616192, allocated=8192000)


def test_batch_multiplies_every_kv_and_archive_figure():
    layers, recipe = gpt_oss_layers(), Recipe()
    one_kv = kv_bytes(layers, 1000, value_bytes=2)
    four_kv = kv_bytes(layers, 1000, value_bytes=2, batch=4)
    assert (four_kv.logical, four_kv.allocated) == (4 * one_kv.logical, 4 * one_kv.allocated)
    one = archive_bytes(layers, 1000, value_bytes=2, recipe=recipe)
    four = archive_bytes(layers, 1000, value_bytes=2, recipe=recipe, batch=4)
    assert (four.resident, four.on_disk, four.n_clusters) == (4 * one.resident, 4 * one.on_disk, one.n_clusters)


def test_archive_of_a_hybrid_model_by_hand():
    # exact 16 + 64, archived 920, clusters 230; 2 global layers x 8 heads; 2 sliding layers x 8 heads x 127 tokens
    # transforms: 15 of 16 coefficients of centroids, of half as many of mean values, of keys and of values; 8 axes, and
    # two means of 4 bytes a number
    transforms = 16 * 2 * 64 * (60 + 30 + 60 + 60 + 8 + 4)
    # a prototype: 4 and 2 bits of 64 numbers; size, address and ten measures of spread
    resident = 16 * (230 * (32 + 16 + 15) + 80 * 256) + 16 * 127 * 256 + 8 * 2 * (80 + 127) + transforms
    # a row: two scales, 3 and 2.5 bits of 64 numbers, and the position; an exact token: a byte a number, two scales
    row, exact = 1 + 24 + 1 + 20 + 2, 2 * (64 + 4)
    on_disk = 16 * (920 * row + 230 * (32 + 16 + 15) + 80 * exact) + 16 * 127 * exact + transforms
    on_disk += 1000 * 12 + 8192
    assert (resident, on_disk) == (1537680, 1863680)
    expected = ArchiveBytes(n_clusters=230, resident=resident, on_disk=on_disk)
    assert archive_bytes(gpt_oss_layers(), 1000, value_bytes=2, recipe=Recipe()) == expected


def test_a_started_cluster_counts_whole():
    layers = plain_layers(n_layers=1, n_kv_heads=1, head_dim=64)
    recipe = Recipe(tokens_per_cluster=8, sink_tokens=0, window_tokens=1)
    assert [archive_bytes(layers, n, value_bytes=2, recipe=recipe).n_clusters for n in (1, 2, 9, 10)] == [0, 1, 1, 2]


def test_a_document_within_sink_and_window_is_kept_exactly_and_nothing_else():
    layers = llama_layers()
    dense = kv_bytes(layers, 50, value_bytes=2).logical
    # in memory the position of a token in each layer; on disk a token's id and characters, once
    expected = ArchiveBytes(n_clusters=0, resident=dense + 32 * 50 * 8, on_disk=dense + 50 * 12)
    lossless = Recipe(key_codec="lossless", value_codec="lossless")
    assert archive_bytes(layers, 50, value_bytes=2, recipe=lossless) == expected
    coded = dataclasses.replace(expected, on_disk=1024 * 50 * 2 * (128 + 4) + 50 * 12)
    assert archive_bytes(layers, 50, value_bytes=2, recipe=Recipe()) == coded


@pytest.fixture(scope="module")
def wide():
    """A model of head dimension 64 in bfloat16, as large models have, and little else."""
    config = tiny_config("llama")
    config.head_dim, config.num_hidden_layers = 64, 2
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    return LoadedModel(model=attach(model), tokenizer=tiny_tokenizer(), name="wide")


@pytest.mark.parametrize("n_tokens", [700, 3000])
@pytest.mark.parametrize("codecs", [("int3", "int2.5"), ("lossless", "lossless")])
def test_the_archive_of_a_model_takes_what_the_ledger_says_to_two_percent(wide, codecs, n_tokens, tmp_path):
    recipe, layout = Recipe(key_codec=codecs[0], value_codec=codecs[1], sink_tokens=24), PromptLayout.plain()
    build_archive(wide, cut_text(wide, layout, DOCUMENT * 6, n_tokens), tmp_path / "a", recipe=recipe, layout=layout)
    archive = Archive.open(tmp_path / "a", wide)
    assert archive.manifest.prefix_tokens <= recipe.sink_tokens
    said = archive_bytes(model_shape(wide.model.config).layers, n_tokens, value_bytes=2, recipe=recipe)
    assert said.resident == pytest.approx(archive.resident_bytes, rel=0.02)
    assert said.on_disk == pytest.approx(archive.disk_bytes, rel=0.02)


@pytest.mark.parametrize(("tied", "n_parameters"), [(True, 105152), (False, 111552)])
def test_parameters_by_hand_with_tied_embeddings_once(tied, n_parameters):
    # embedding 6400; per layer q 8192, k 4096, v 4096, o 8192, head norms 64, MLP 24576, norms 128; last norm 64
    assert n_parameters == 6400 * (1 if tied else 2) + 2 * 49344 + 64
    config = tiny_qwen(tie_word_embeddings=tied)
    assert count_parameters(config) == n_parameters
    assert weight_bytes(config, value_bytes=4) == 4 * n_parameters


def test_rows_are_sorted_and_each_length_comes_once():
    rows = build_ledger(llama_layers(), [300, 100, 300], value_bytes=2)
    assert [entry.n_tokens for entry in rows] == [100, 300]


def test_shares_and_fit_by_hand():
    entry = row(25, weights=75, gpu_memory=99, resident=24)
    assert (entry.kv_share, entry.gpu_share) == (0.25, 25 / 99)
    assert (entry.fits, entry.archive_fits) == (False, True)
    assert row(25, weights=75, gpu_memory=100).fits is True


def test_worth_it_starts_above_one_third():
    assert row(100, weights=200).worth_it is False
    assert row(101, weights=200).worth_it is True


def test_fit_is_unknown_without_weights_unless_kv_alone_is_too_much():
    assert row(10, gpu_memory=20).fits is None
    assert row(30, gpu_memory=20).fits is False
    assert row(10, weights=10).fits is None


@pytest.mark.parametrize(
    ("entry", "verdict"),
    [
        (row(60, weights=40), "KV is 60.0% of total memory at 1000 tokens, over a third: an archive is worth it."),
        (
            row(20, weights=80),
            "KV is 20.0% of total memory at 1000 tokens, not over a third: an archive saves little.",
        ),
        (
            row(20, weights=80, gpu_memory=90),
            "KV is 20.0% of total memory at 1000 tokens, not over a third: an archive saves little, but only with it "
            "does the model fit the card.",
        ),
        (
            row(20, gpu_memory=40),
            "KV is 50.0% of the card at 1000 tokens; the weights are unknown, so the KV share of total memory is too: "
            "name a model to get it.",
        ),
        (
            row(20),
            "The weights are unknown, so the KV share of total memory is too: name a model to get it.",
        ),
    ],
)
def test_verdict_gives_the_number_or_says_what_is_missing(entry, verdict):
    assert entry.verdict == verdict


@pytest.mark.parametrize(
    ("name", "n_bytes"), [("bf16", 2), ("bfloat16", 2), ("fp16", 2), ("float16", 2), ("fp32", 4), ("float32", 4)]
)
def test_dtype_names(name, n_bytes):
    assert dtype_bytes(name) == n_bytes


def test_unknown_dtype_names_the_value_and_what_is_allowed():
    with pytest.raises(ConfigError, match=r"'int8'.*bf16"):
        dtype_bytes("int8")


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("24GiB", 24 * GIB),
        ("24GB", 24 * 10**9),
        ("24", 24 * GIB),
        (" 1.5 gib ", 3 * GIB // 2),
        ("512MiB", 512 * 2**20),
        ("1TB", 10**12),
        ("7B", 7),
    ],
)
def test_sizes(text, n_bytes):
    assert parse_size(text) == n_bytes


@pytest.mark.parametrize("text", ["", "GiB", "24 G", "24 bananas", "-1GiB", "0", "0.1B", "1e3GiB", "nan", "٢GiB"])
def test_a_bad_size_is_a_config_error_with_the_value(text):
    with pytest.raises(ConfigError, match="give a positive number") as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    "call",
    [
        lambda: plain_layers(n_layers=0, n_kv_heads=1, head_dim=1),
        lambda: kv_bytes(llama_layers(), 0, value_bytes=2),
        lambda: kv_bytes(llama_layers(), 1, value_bytes=2, batch=0),
        lambda: archive_bytes(llama_layers(), -5, value_bytes=2, recipe=Recipe()),
        lambda: build_ledger(llama_layers(), [10, 0], value_bytes=2),
    ],
)
def test_counts_below_one_are_refused(call):
    with pytest.raises(ConfigError, match="at least 1"):
        call()


def test_a_recipe_for_layers_that_are_not_there_is_refused():
    recipe = Recipe(layer_codecs={"32": {"key_codec": "int8"}})
    with pytest.raises(ConfigError, match="there is no layer 32; the model has layers 0 to 31"):
        build_ledger(llama_layers(), [4096], value_bytes=2, recipe=recipe)


@pytest.mark.parametrize(("name", "magic"), [("kv.png", b"\x89PNG"), ("kv.svg", b"<?xml")])
def test_plot_is_written_in_the_format_of_its_suffix(tmp_path, name, magic):
    rows = build_ledger(llama_layers(), [4096, 32768], value_bytes=2, weights=13 * GIB, gpu_memory=24 * GIB)
    plot_ledger(rows, tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(magic)


def test_plot_refuses_a_bad_suffix_and_a_folder_that_is_not_there(tmp_path):
    rows = build_ledger(llama_layers(), [4096], value_bytes=2)
    with pytest.raises(ConfigError, match=r"'\.gif'.*\.png, \.svg"):
        plot_ledger(rows, tmp_path / "kv.gif")
    with pytest.raises(ConfigError, match="cannot be written: No such file"):
        plot_ledger(rows, tmp_path / "missing" / "kv.png")
    with pytest.raises(ConfigError, match="at least one"):
        plot_ledger([], tmp_path / "kv.png")
