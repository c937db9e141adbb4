import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from turnstream.errors import ConflictError, InvalidConfigError
from turnstream_server.models.adapters import Adapter, Adapters
from turnstream_server.models.policy import load_policy, save_policy
from turnstream_server.models.spec import AdapterConfig, SmallModelSpec, layer_switches

SPEC = SmallModelSpec(vocab_size=40, hidden_size=16, intermediate_size=24, num_heads=2)
IDS = torch.tensor([[3, 1, 4, 1, 5]])
ATTENTION = ["k_proj", "o_proj", "q_proj", "v_proj"]
MLP = ["down_proj", "gate_proj", "up_proj"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a base model."""
    folder = tmp_path_factory.mktemp("models") / "base"
    save_policy(load_policy(SPEC), folder)
    return folder


def _adapters(base: Path) -> Adapters:
    return Adapters(load_policy(base), base)


@pytest.mark.parametrize(
    ("layers", "names"),
    [
        ("attention", ATTENTION),
        ("mlp", MLP),
        ("unembedding", ["lm_head"]),
        ("attention,mlp,unembedding", [*ATTENTION, *MLP, "lm_head"]),
    ],
)
def test_adapter_has_weights_of_its_layers_alone(base: Path, layers: str, names: list[str]) -> None:
    adapter = _adapters(base).add("one", AdapterConfig(rank=2, **layer_switches(layers)))

    found = {name.split(".lora_")[0].split(".")[-1] for name, _ in adapter.named_parameters()}

    assert found == set(names)
    weights = dict(adapter.named_parameters())
    assert all(min(weight.shape) == 2 for weight in weights.values())
    trained = {name for name, each in adapter.model.named_parameters() if each.requires_grad}
    assert trained == weights.keys()


def test_layers_with_equal_names_are_distinguished() -> None:
    adapters = Adapters(load_policy(SmallModelSpec(architecture="gpt2", vocab_size=40)), Path())

    adapter = adapters.add("one", AdapterConfig(rank=2, train_mlp=False))

    assert all(".attn.c_" in name for name, _ in adapter.named_parameters())


def test_first_weights_depend_on_the_seed_and_not_on_the_order(base: Path) -> None:
    one, other = AdapterConfig(rank=2, seed=1), AdapterConfig(rank=4, seed=2, train_mlp=False)
    forward, backward = _adapters(base), _adapters(base)
    before = torch.get_rng_state()

    first = [forward.add("one", one), forward.add("other", other)]
    second = [backward.add("other", other), backward.add("one", one)][::-1]
    reseeded = forward.add("reseeded", AdapterConfig(rank=2, seed=3))

    assert torch.equal(before, torch.get_rng_state())
    for expected, actual in zip(first, second, strict=True):
        assert _equal(expected, actual)
    assert not _equal(first[0], reseeded)


def test_adapter_that_is_off_leaves_the_base_model(base: Path) -> None:
    expected = load_policy(base)(IDS).logits
    adapter = _adapters(base).add("one", AdapterConfig(rank=2))
    assert torch.equal(_logits(adapter), expected)  # the second factors are zeros
    _change(adapter)

    with adapter.off(), torch.no_grad():
        off = adapter.model(IDS).logits

    assert torch.equal(off, expected)
    assert not torch.allclose(_logits(adapter), expected)


def test_written_adapter_loads_bit_equal_here_and_in_peft(base: Path, tmp_path: Path) -> None:
    adapters = _adapters(base)
    other = adapters.add("other", AdapterConfig(rank=3, seed=9, train_unembedding=True))
    adapter = adapters.add("one", AdapterConfig(rank=2, alpha=5.0, train_unembedding=True))
    _change(adapter)
    _change(other)

    adapter.write(tmp_path)

    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base.resolve())
    assert config["target_modules"] == sorted(config["target_modules"])
    expected = _logits(adapter)
    assert torch.equal(_logits(_adapters(base).load("loaded", tmp_path)), expected)
    with torch.no_grad():
        assert torch.equal(load_policy(tmp_path)(IDS).logits, expected)
        plain = AutoModelForCausalLM.from_pretrained(base).eval()
        assert torch.equal(PeftModel.from_pretrained(plain, str(tmp_path))(IDS).logits, expected)


def test_bfloat16_base_has_float32_adapters(base: Path, tmp_path: Path) -> None:
    adapters = Adapters(load_policy(base, dtype=torch.bfloat16), base)

    adapter = adapters.add("one", AdapterConfig(rank=2))
    adapter.write(tmp_path)
    loaded = adapters.load("loaded", tmp_path)

    for each in (adapter, loaded):
        assert {weight.dtype for _, weight in each.named_parameters()} == {torch.float32}
    assert adapter.model.get_input_embeddings().weight.dtype == torch.bfloat16
    assert _equal(adapter, loaded)


def test_adapter_of_a_missing_or_another_base_is_refused(base: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    save_policy(load_policy(base), moved)
    _adapters(moved).add("one", AdapterConfig(rank=2)).write(tmp_path)
    moved.rename(tmp_path / "away")
    wide = load_policy(SmallModelSpec(vocab_size=40, hidden_size=32, num_heads=2))

    with pytest.raises(InvalidConfigError, match=r"needs the base model .*moved: no such folder"):
        load_policy(tmp_path)
    with pytest.raises(InvalidConfigError, match="does not fit"):
        Adapters(wide, base).load("one", tmp_path)


def test_names_are_checked_and_freed_by_removal(base: Path) -> None:
    adapters = _adapters(base)
    adapters.add("one", AdapterConfig(rank=2))

    with pytest.raises(ConflictError, match="'one' already"):
        adapters.add("one", AdapterConfig(rank=2))
    with pytest.raises(InvalidConfigError, match=r"adapter: 'a\.b'"):
        adapters.add("a.b", AdapterConfig(rank=2))
    adapters.add("other", AdapterConfig(rank=2))
    for name in ("one", "other"):
        adapters.remove(name)
    again = adapters.add("one", AdapterConfig(rank=3))
    assert torch.equal(_logits(again), load_policy(base)(IDS).logits)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"rank": 0}, "lora_rank"),
        ({"rank": 1, "alpha": 0.0}, "lora_alpha"),
        ({"rank": 1, "train_attention": False, "train_mlp": False}, "lora_layers"),
    ],
)
def test_invalid_adapter_is_refused_by_its_option(values: dict[str, float], field: str) -> None:
    with pytest.raises(InvalidConfigError, match=field):
        AdapterConfig(**values)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidConfigError, match="lora_layers: 'heads' is not one of"):
        layer_switches("attention,heads")


def _change(adapter: Adapter) -> None:
    """Give the second factors values, so that the adapter changes the output."""
    with torch.no_grad():
        for _, weight in adapter.named_parameters():
            weight += torch.arange(weight.numel()).reshape(weight.shape) % 7 / 10


@torch.no_grad()
def _logits(adapter: Adapter) -> Tensor:
    adapter.activate()
    return adapter.model(IDS).logits


def _equal(one: Adapter, other: Adapter) -> bool:
    pairs = zip(one.named_parameters(), other.named_parameters(), strict=True)
    return all(torch.equal(weight, again) for (_, weight), (_, again) in pairs)
