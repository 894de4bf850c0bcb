"""A model that changes after its fingerprint was taken: noticed at each request, without hashing again each time."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from ragkv import Archive, Catalog, LoadedModel, ask, attach, build_archive
from ragkv.errors import ModelMismatchError
from ragkv.model import fingerprint as fingerprints
from ragkv.model.fingerprint import require_match
from ragkv.model.stamp import weight_stamp
from ragkv.model.weights import weights_sha256
from tests.archives import SMALL
from tests.tiny import TEXT, tiny_model, tiny_tokenizer

F32 = torch.float32


def fresh(name: str = "llama") -> LoadedModel:
    return LoadedModel(model=attach(tiny_model(name)), tokenizer=tiny_tokenizer(), name=name)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The dtype of every hash of all weights."""
    calls: list[torch.dtype] = []

    def counted(model: nn.Module, dtype: torch.dtype) -> str:
        calls.append(dtype)
        return weights_sha256(model, dtype)

    monkeypatch.setattr(fingerprints, "weights_sha256", counted)
    return calls


def down(model: PreTrainedModel) -> nn.Linear:
    linear: nn.Linear = model.model.layers[1].mlp.down_proj
    return linear


# --- hashed once, and again after a change


def test_weights_are_hashed_once_for_each_dtype(hashed: list[torch.dtype]) -> None:
    model = fresh()
    twin = LoadedModel(model=model.model, tokenizer=model.tokenizer, name="twin")
    assert model.fingerprint() == model.fingerprint(F32) == twin.fingerprint()
    assert hashed == [F32]
    require_match(model.fingerprint(torch.bfloat16), twin)
    assert hashed == [F32, torch.bfloat16]


def test_threads_that_ask_together_hash_once(hashed: list[torch.dtype]) -> None:
    model = fresh()
    threads = [threading.Thread(target=model.fingerprint) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert hashed == [F32]


def test_generating_changes_nothing(hashed: list[torch.dtype]) -> None:
    for name in ("gemma3", "gpt_oss"):
        model = fresh(name)
        model.fingerprint()
        ids = torch.arange(10, 40).unsqueeze(0)
        model.model.generate(ids, max_new_tokens=4, do_sample=False)
        model.fingerprint()
    assert hashed == [F32, F32]


def test_what_is_known_goes_with_the_model() -> None:
    model = fresh()
    model.fingerprint()
    gone = weakref.ref(model.model)
    del model
    gc.collect()
    assert gone() is None


def zero_in_place(model: PreTrainedModel) -> None:
    with torch.no_grad():
        down(model).weight.zero_()


def zero_in_inference_mode(model: PreTrainedModel) -> None:
    with torch.inference_mode():
        down(model).weight.zero_()


def zero_behind(model: PreTrainedModel) -> None:
    down(model).weight.data.zero_()


def add_behind(model: PreTrainedModel) -> None:
    model.model.norm.weight.data.add_(1e-3)


def one_number(model: PreTrainedModel) -> None:
    with torch.no_grad():
        down(model).weight[3, 3] += 1e-3


def other_data(model: PreTrainedModel) -> None:
    down(model).weight.data = down(model).weight.data * 1.01


def replace(model: PreTrainedModel) -> None:
    down(model).weight = nn.Parameter(torch.zeros_like(down(model).weight))


def load_others(model: PreTrainedModel) -> None:
    model.load_state_dict(tiny_model("llama", seed=1).state_dict())


def swap_layers(model: PreTrainedModel) -> None:
    one, other = model.model.layers[0].mlp, model.model.layers[1].mlp
    one.up_proj.weight, other.up_proj.weight = other.up_proj.weight, one.up_proj.weight


def swap_within_a_layer(model: PreTrainedModel) -> None:
    attention = model.model.layers[0].self_attn
    attention.k_proj.weight.data, attention.v_proj.weight.data = (
        attention.v_proj.weight.data,
        attention.k_proj.weight.data,
    )


class Adapted(nn.Module):
    """What PEFT puts in the place of a linear layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.Linear(base.in_features, 2, bias=False)
        self.lora_B = nn.Linear(2, base.out_features, bias=False)
        self._active_adapter, self._disable_adapters = ["default"], False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base_layer(x)
        return out if self._disable_adapters else out + self.lora_B(self.lora_A(x))


def adapt(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp.down_proj = Adapted(down(model))


def add_buffer(model: PreTrainedModel) -> None:
    model.model.register_buffer("shift", torch.ones(3))


def other_frequencies(model: PreTrainedModel) -> None:
    model.model.rotary_emb.inv_freq.mul_(1.5)


CHANGES = (
    zero_in_place,
    zero_in_inference_mode,
    zero_behind,
    add_behind,
    one_number,
    other_data,
    replace,
    load_others,
    swap_layers,
    swap_within_a_layer,
    adapt,
    add_buffer,
    other_frequencies,
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_after_the_first_look_is_refused_and_named(change: Callable[[PreTrainedModel], None]) -> None:
    model = fresh()
    archived = model.fingerprint()
    change(model.model)
    with pytest.raises(ModelMismatchError) as raised:
        require_match(archived, model, what="catalog 'c'")
    named = "rope_parameters" if change is other_frequencies else "weights_sha256"
    said = str(raised.value)
    assert said.startswith(f"the catalog 'c' was built with another model: its {named} is ")
    assert "and the loaded model's is" in said
    assert "\n" not in said


def test_a_change_of_a_buffer_that_is_saved_is_refused() -> None:
    model = fresh()
    add_buffer(model.model)
    archived = model.fingerprint()
    model.model.model.shift.data.mul_(2)
    with pytest.raises(ModelMismatchError, match="weights_sha256"):
        require_match(archived, model)


def test_an_adapter_that_is_switched_off_or_removed_is_noticed() -> None:
    model = fresh()
    plain = model.fingerprint()
    base = down(model.model)
    adapt(model.model)
    adapted = model.fingerprint()
    model.model.model.layers[1].mlp.down_proj._disable_adapters = True
    assert model.fingerprint() not in (plain, adapted)
    model.model.model.layers[1].mlp.down_proj = base
    require_match(plain, model)


def test_a_changed_tokenizer_is_noticed() -> None:
    model = fresh()
    archived = model.fingerprint()
    model.tokenizer.add_tokens(["<lighthouse-keeper>"])
    with pytest.raises(ModelMismatchError, match="tokenizer_sha256"):
        require_match(archived, model)


def test_a_change_back_is_no_change(hashed: list[torch.dtype]) -> None:
    model = fresh()
    archived = model.fingerprint()
    kept = down(model.model).weight.detach().clone()
    zero_in_place(model.model)
    assert model.fingerprint() != archived
    with torch.no_grad():
        down(model.model).weight.copy_(kept)
    require_match(archived, model)
    assert len(hashed) == 3


def test_an_open_archive_and_a_catalog_refuse_a_model_that_changed(tmp_path: Path) -> None:
    """Answers would come from a mixed state, and a new archive would be stored under the old identity."""
    model = fresh()
    build_archive(model, TEXT, tmp_path / "archive", recipe=SMALL)
    archive = Archive.open(tmp_path / "archive", model)
    catalog = Catalog.create(tmp_path / "catalog", model, recipe=SMALL)
    ask(archive, "Who?", max_new_tokens=2)
    zero_behind(model.model)
    for refused in (
        lambda: ask(archive, "Who?", max_new_tokens=2),
        lambda: catalog.add(TEXT),
        lambda: Archive.open(tmp_path / "archive", model),
    ):
        with pytest.raises(ModelMismatchError, match="its weights_sha256 is"):
            refused()
    assert not catalog.entries()


def test_the_quick_look_reads_little(hashed: list[torch.dtype]) -> None:
    """Two milliseconds for a model of 291 weights; asked for here with room for a busy machine."""
    model = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(291))
    times = []
    for _ in range(20):
        started = time.perf_counter()
        weight_stamp(model)
        times.append(time.perf_counter() - started)
    assert min(times) < 0.02
    assert sum(map(len, weight_stamp(model).samples)) < 291 * 64 * 4


@pytest.mark.parametrize("size", [1, 2, 31, 32, 33, 63, 64, 65, 100, 127, 1000, 4096])
def test_the_quick_look_reaches_the_ends_of_a_tensor(size: int) -> None:
    """A change of the last eighth of a tensor, or of the first, is seen."""
    model = nn.ParameterList([nn.Parameter(torch.ones(size))])
    part = max(1, size // 8)
    for place in (slice(0, part), slice(size - part, size)):
        before = weight_stamp(model)
        model[0].data[place] = 5.0
        assert weight_stamp(model) != before
        model[0].data.fill_(1.0)
