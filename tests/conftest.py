"""What every test shares: no network, two threads, tiny models and tokenizers."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads starve each other on a busy machine
# isort: split

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.tiny import tiny_model, tiny_tokenizer


@pytest.fixture(scope="session", autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


@pytest.fixture(scope="session")
def bos_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer variant that puts BOS before every text."""
    return tiny_tokenizer(adds_bos=True)


@pytest.fixture
def make_model() -> Callable[..., PreTrainedModel]:
    """`tiny_model`: a fresh model per call, so that a test may change it."""
    return tiny_model


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of this test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("RAGKV_CACHE", str(folder))
    return folder
