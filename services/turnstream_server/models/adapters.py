"""LoRA adapters on one base model, by peft: each is trained, saved and loaded for itself.

    base = load_policy(folder)
    adapters = Adapters(base, folder)
    one = adapters.add("one", AdapterConfig(rank=16))
    one.activate()
    base(input_ids)
    with one.off():
        base(input_ids)  # the base model itself

A folder of an adapter has peft's layout: `adapter_config.json`, which names the folder of the base
model, and `adapter_model.safetensors`.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, cast

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import Parameter
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from turnstream.errors import ConflictError, InvalidConfigError
from turnstream_server.models.spec import AdapterConfig

_WEIGHTS: Final = "adapter_model.safetensors"
_ATTENTION: Final = re.compile(r"attn|attention")
_MLP: Final = re.compile(r"mlp|ffn|feed_?forward|\bfc\d")


def base_folder(folder: Path) -> Path:
    """Return the folder of the base model that an adapter folder names."""
    named = _read_config(folder).base_model_name_or_path
    if not named or not Path(named).is_dir():
        raise InvalidConfigError("policy", f"{folder} needs the base model {named}: no such folder")
    return Path(named)


class Adapter:
    """One adapter of a base model, by its name in `Adapters`. The model has all of them."""

    def __init__(self, peft: PeftModel, name: str) -> None:
        self.model = cast(PreTrainedModel, peft.get_base_model())
        self.name = name
        self._peft = peft

    @property
    def alpha(self) -> float:
        """Updates are scaled by alpha / rank."""
        return self._config.lora_alpha

    @property
    def base(self) -> str:
        """Folder of the base model."""
        return str(self._config.base_model_name_or_path)

    def activate(self) -> None:
        """Make this the adapter of forward passes, until another one is activated."""
        self._peft.set_adapter(self.name)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Make forward passes those of the base model, for reference log-probabilities."""
        with self._peft.disable_adapter():
            yield

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield the weights of this adapter, float32, in an order that does not change."""
        for name, weight in self.model.named_parameters():
            if f".lora_A.{self.name}." in name or f".lora_B.{self.name}." in name:
                yield name, weight

    def write(self, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
        """Write configuration and weights into an existing folder, in peft's layout.

        `weights` are whole ones by their names here, for a model that is sharded.
        """
        config = copy.copy(self._config)
        if not isinstance(config.target_modules, str):  # a set, whose order each process has anew
            config.target_modules = sorted(config.target_modules or ())
        config.save_pretrained(str(folder))
        tensors = {
            _stored_name(name, self.name): weight.detach().cpu().contiguous()
            for name, weight in (weights or dict(self.named_parameters())).items()
        }
        save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})

    def require(self, config: AdapterConfig) -> None:
        """Raise InvalidConfigError if rank, alpha or layers are not those of `config`."""
        for field, actual, wanted in (
            ("lora_rank", self._config.r, config.rank),
            ("lora_alpha", self._config.lora_alpha, config.alpha),
            ("lora_layers", _targets_of(self._config), _targets(self.model, config)),
        ):
            if actual != wanted:
                raise InvalidConfigError(field, f"{wanted}, and the loaded adapter has {actual}")

    @property
    def _config(self) -> LoraConfig:
        return cast(LoraConfig, self._peft.peft_config[self.name])


class Adapters:
    """The adapters of one base model, whose weights stay as they are.

    The folders of adapters name `base`, its folder.
    """

    def __init__(self, model: PreTrainedModel, base: Path) -> None:
        self._model = model.requires_grad_(False)
        self._base = str(base.resolve())
        self._peft: PeftModel | None = None

    def add(self, name: str, config: AdapterConfig) -> Adapter:
        """Add and return a new adapter. Its first output is that of the base model.

        Equal seeds give equal weights, in any order of creation.

        Raises:
            InvalidConfigError: the model has no linear layer of a wanted kind.
            ConflictError: the name is taken.
        """
        lora = LoraConfig(
            r=config.rank,
            lora_alpha=cast(int, config.alpha),
            target_modules=_targets(self._model, config),
            task_type="CAUSAL_LM",
        )
        return self._inject(name, lora, seed=config.seed)

    def load(self, name: str, folder: Path) -> Adapter:
        """Add and return the adapter of a folder; InvalidConfigError if it does not fit."""
        lora = _read_config(folder)
        lora.inference_mode = False
        adapter = self._inject(name, lora, seed=0)
        stored = load_file(folder / _WEIGHTS)
        weights = dict(adapter.named_parameters())
        names = {_stored_name(each, name): each for each in weights}
        if {key: value.shape for key, value in stored.items()} != {
            key: weights[each].shape for key, each in names.items()
        }:
            raise InvalidConfigError("policy", f"the adapter of {folder} does not fit {self._base}")
        with torch.no_grad():
            for key, each in names.items():
                weights[each].copy_(stored[key])
        return adapter

    @contextmanager
    def using(self, name: str) -> Iterator[None]:
        """Make forward passes those of an adapter, or of the base model for the name ""."""
        if name and (self._peft is None or name not in self._peft.peft_config):
            raise InvalidConfigError("adapter", f"the base model has no adapter {name!r}")
        if self._peft is None:
            yield
        elif name:
            self._peft.set_adapter(name)
            yield
        else:
            with self._peft.disable_adapter():
                yield

    def remove(self, name: str) -> None:
        """Delete an adapter and its weights; its `Adapter` must not be used any more."""
        if self._peft is None or name not in self._peft.peft_config:
            return
        if len(self._peft.peft_config) == 1:
            self._peft.unload()
            self._peft = None
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=f"Adapter {name} was active")
            self._peft.delete_adapter(name)

    def _inject(self, name: str, lora: LoraConfig, *, seed: int) -> Adapter:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            raise InvalidConfigError("adapter", f"{name!r} is not a name of letters, digits, _, -")
        if self._peft is not None and name in self._peft.peft_config:
            raise ConflictError(f"the base model has an adapter {name!r} already")
        lora.base_model_name_or_path = None  # peft would compare it with the name of the model
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            # peft reports and handles the transposed weights of GPT-2, and uses an older name.
            warnings.filterwarnings("ignore", message="fan_in_fan_out")
            warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`")
            torch.default_generator.manual_seed(seed)
            if self._peft is None:
                self._peft = cast(PeftModel, get_peft_model(cast(Any, self._model), lora, name))
            else:
                self._peft.add_adapter(name, lora)
        self._peft.eval()
        lora.base_model_name_or_path = self._base
        return Adapter(self._peft, name)


def _read_config(folder: Path) -> LoraConfig:
    config = PeftConfig.from_pretrained(str(folder))
    if not isinstance(config, LoraConfig):
        raise InvalidConfigError("policy", f"{folder} holds no LoRA adapter: {config.peft_type}")
    return config


def _targets(model: PreTrainedModel, config: AdapterConfig) -> list[str]:
    """Return ends of the names of the wanted layers that no other layer's name has."""
    kinds = _kinds(model)
    for layer in config.layers:
        if layer not in kinds.values():
            message = f"a {model.config.model_type} model has no linear layer of kind {layer}"
            raise InvalidConfigError("lora_layers", message)
    wanted = [name for name, kind in kinds.items() if kind in config.layers]
    others = [name for name, kind in kinds.items() if kind not in config.layers]
    for num_words in (1, 2):
        ends = {".".join(name.split(".")[-num_words:]) for name in wanted}
        if not any(f".{name}".endswith(f".{end}") for name in others for end in ends):
            return sorted(ends)
    return sorted(wanted)


def _targets_of(lora: LoraConfig) -> list[str]:
    targets = lora.target_modules
    return [targets] if isinstance(targets, str) else sorted(targets or [])


def _kinds(model: PreTrainedModel) -> dict[str, str]:
    """Return the kind of each linear layer by its name; "" for one of no kind."""
    head = model.get_output_embeddings()
    return {
        name: "unembedding" if module is head else _kind(name)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D | LoraLayer)
        and not re.search(r"\.(lora_[AB]\.|base_layer$)", name)
    }


def _kind(name: str) -> str:
    """Return the kind of a layer.

    >>> _kind("model.layers.0.self_attn.q_proj"), _kind("model.layers.0.mlp.up_proj")
    ('attention', 'mlp')
    """
    if _ATTENTION.search(name):
        return "attention"
    return "mlp" if _MLP.search(name) else ""


def _stored_name(name: str, adapter: str) -> str:
    """Return the name of a weight in a folder, which is that of peft's own model.

    >>> _stored_name("model.q_proj.lora_A.one.weight", "one")
    'base_model.model.model.q_proj.lora_A.weight'
    """
    return "base_model.model." + re.sub(rf"(\.lora_[AB])\.{re.escape(adapter)}\.", r"\1.", name)
