"""The format as ``indexes/FORMAT.md`` states it: readers written from that text alone find what was written."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shutil
import struct
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from ragkv import Archive, LoadedModel, PromptLayout, RagkvError, Recipe, attach, build_archive
from ragkv.archive.manifest import read_manifest
from ragkv.archive.verify import verify_archive
from ragkv.errors import ArchiveCorruptError, ArchiveFormatError
from ragkv.model.fingerprint import config_sha256, tokenizer_sha256
from ragkv.model.weights import weights_sha256
from ragkv.recipe import RecallPolicy
from tests.archives import SMALL, archive_of, loaded
from tests.forge import edit_manifest
from tests.tiny import TEXT, tiny_config, tiny_tokenizer

INDEXES = Path(__file__).resolve().parent.parent / "indexes"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small archive; do not change it."""
    return archive_of(tmp_path_factory.mktemp("built") / "a", document=TEXT).path


@pytest.fixture
def folder(built: Path, tmp_path: Path) -> Path:
    """A copy of it to damage."""
    return shutil.copytree(built, tmp_path / "a")


# --- manifest


def leaves(value: object, name: str = "") -> set[str]:
    """Names of all fields as FORMAT.md writes them; entries of `layers` by their own name."""
    if name in ("model.rope_parameters", "recipe.layer_codecs", "policy.layer_budgets") or not isinstance(value, dict):
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
    assert {"recipe.key_codec", "policy.budget", "files.*.sha256", "exact_tokens"} <= leaves(body)
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


@pytest.mark.parametrize("version", [0, 1, 2, 4, "3", None])
def test_another_version_is_refused(version: object, folder: Path) -> None:
    edit_manifest(folder, lambda body: body.__setitem__("version", version))
    refused(folder, ArchiveFormatError, f"format version {version!r}, this release reads 3")


def test_another_format_is_refused(folder: Path) -> None:
    edit_manifest(folder, lambda body: body.__setitem__("format", "zip"))
    refused(folder, ArchiveFormatError, "not a ragkv-archive file")


def test_an_edited_field_is_refused(folder: Path) -> None:
    edit_manifest(folder, lambda body: body["model"].__setitem__("name", "other"), checksum=False)
    refused(folder, ArchiveCorruptError, "its own checksum does not hold")


@pytest.mark.parametrize(
    "text", ["", "{", "[]\n", "null\n", "{}\n", "[" * 100_000 + "}\n", '{"a": 1}\n\n', "\ufeff{}\n"]
)
def test_other_text_is_refused(text: str, folder: Path) -> None:
    (folder / "manifest.json").write_text(text, encoding="utf-8")
    refused(folder, RagkvError, "manifest.json: ")


@pytest.mark.parametrize(
    "place", ["", "model", "layout", "seams", "document", "counts", "recipe", "policy", "layers.0"]
)
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
        ("layers.1.key_dim", [2.0, "2", None]),
        ("transforms", [None, "", "0" * 64, 3]),
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
        ("recipe", [{}, None, {"seed": 0}]),
        ("recipe.key_codec", ["int5", None, 3]),
        ("recipe.exact_codec", ["int4", None]),
        ("recipe.key_prototype_bits", [0, 9, 4.0]),
        ("policy", [{}, None, {"budget": 0}, {"budget": "all"}]),
        ("counts.clusters_asked", [-1, "x"]),
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
    edit_manifest(folder, lambda body: body["files"].__setitem__("../../secret", {"sha256": "0" * 64, "bytes": 1}))
    refused(folder, ArchiveFormatError, "disagree on '../../secret'")


# --- folder


def test_an_archive_is_at_most_six_files_whatever_its_layers(tmp_path: Path, built: Path) -> None:
    names = [found.name for found in built.iterdir()]
    assert sorted(names) == sorted(["manifest.json", *read_manifest(built).files])
    assert len(names) == 6
    config = tiny_config("llama")
    config.num_hidden_layers = 9
    model = LoadedModel(
        model=attach(AutoModelForCausalLM.from_config(config).eval()), tokenizer=tiny_tokenizer(), name="deep"
    )
    build_archive(model, TEXT, tmp_path / "deep", recipe=SMALL, layout=PromptLayout.plain())
    assert sorted(found.name for found in (tmp_path / "deep").iterdir()) == sorted(names)


def test_a_short_document_has_three_files(tmp_path: Path) -> None:
    archive = archive_of(tmp_path / "a", document="Short.")
    assert sorted(found.name for found in archive.path.iterdir()) == ["manifest.json", "rows.parquet", "tokens.parquet"]


# --- fingerprint, tokens, recipe


def test_the_hash_of_the_weights_is_as_documented() -> None:
    model, total = loaded("gemma2").model, hashlib.sha256()
    for tensor in model.state_dict().values():
        numbers = np.ascontiguousarray(tensor.to(torch.float16).numpy())
        entry = hashlib.sha256(f"{tuple(tensor.shape)} torch.float16".encode())
        entry.update(numbers.tobytes())
        total.update(entry.digest())
    assert weights_sha256(model, torch.float16) == total.hexdigest()


def test_the_hash_of_the_configuration_is_as_documented() -> None:
    hashed = {
        "activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": 8.0,
        "final_logit_softcapping": 30.0,
        "head_dim": 16.0,
        "model_type": "gemma2",
        "n_kv_heads": 2.0,
        "n_query_heads": 4.0,
        "query_pre_attn_scalar": 16.0,
        "rms_norm_eps": 1e-6,
        "windows": [24.0, None, 24.0, None],
    }
    expected = hashlib.sha256(canonical(hashed).encode()).hexdigest()
    assert config_sha256(loaded("gemma2").model.config) == expected


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
    assert lines == [line for line in Recipe().to_toml().splitlines() if line]


def test_the_commented_keys_of_the_default_recipe_file_are_valid() -> None:
    text = (INDEXES / "recipes" / "default.toml").read_text(encoding="utf-8")
    for start, change in (
        ("top_m", {"top_m": 32}),
        ("mass", {"mass": 0.95}),
        ("layer_budgets", {"layer_budgets": {"5": 512}}),
    ):
        shown = re.sub(rf"^# (?=(\[recall\.)?{start}\b)", "", text, flags=re.MULTILINE)
        shown = shown.replace("# 5 = 512", "5 = 512") if start == "layer_budgets" else shown
        asked = tomllib.loads(shown)["recall"]
        assert {name: asked[name] for name in change} == change
        RecallPolicy.from_dict(asked)


def test_every_key_of_a_recipe_is_in_the_default_recipe_file() -> None:
    text = (INDEXES / "recipes" / "default.toml").read_text(encoding="utf-8")
    names = [field.name for kind in (Recipe, RecallPolicy) for field in dataclasses.fields(kind)]
    assert [name for name in names if not re.search(rf"^(# )?\[?(recall\.)?{name}\b", text, flags=re.MULTILINE)] == []
