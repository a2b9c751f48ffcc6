"""Adapters: the small trained modules that PEFT puts into the layers of a frozen model.

`peft.get_peft_model` replaces modules of a transformers model by its own, which hold the replaced
module and the adapter's tensors. The result is still a transformers model, with a wrapper around
it. Penstock trains that model as any other: most tensors of a layer are frozen, and the adapter's
are trained. What this module adds is what must be known about adapters: which of PEFT's methods are
part of the layers, how to make a twin with the same adapter, and the names that PEFT gives to the
tensors in its files.
"""

from __future__ import annotations

import copy
import json
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.errors import SettingsError, UnsupportedModelError
from penstock.lora_options import LoraOptions

if TYPE_CHECKING:
    from torch import nn

BASE_LAYER = ".base_layer."
"""In names of tensors: a module that an adapter has replaced."""

ORIGINAL = ".original_module."
"""In names of tensors: a module of which PEFT trains a copy (`modules_to_save`)."""

COPIES = ".modules_to_save."
"""In names of tensors: that copy. The adapter's name follows."""

WRAPPER = "base_model.model."
"""Prefix of the names in a PEFT model, and in the files of an adapter."""

_NOT_COMPUTED = ("base_model_name_or_path", "revision", "peft_version", "auto_mapping", "task_type")
"""Fields of an adapter's config that do not change what it computes."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """The adapter of a model."""

    name: str
    """Its name in the model, mostly `default`. It is part of the names of tensors."""
    config: Any
    """PEFT's config of it."""

    @property
    def method(self) -> str:
        """PEFT's name of the method, such as LORA."""
        return str(getattr(self.config.peft_type, "value", self.config.peft_type))

    @property
    def key(self) -> dict[str, Any]:
        """Everything that the adapter's computation depends on, as JSON."""
        fields = {k: v for k, v in self.config.to_dict().items() if k not in _NOT_COMPUTED}
        return {"name": self.name, **{k: _as_json(v) for k, v in fields.items()}}

    def attach(self, model: nn.Module) -> nn.Module:
        """Put the adapter into a model without weights; its tensors have no memory either.

        Returns the model, in which only the adapter is trained.
        """
        try:
            self._inject(copy.deepcopy(self.config), model, low_cpu_mem_usage=True)
        except ValueError as problem:  # for example, no module has the name of a target
            hint = ""
            if "ParamWrapper" in str(problem) and getattr(self.config, "lora_dropout", None):
                hint = " PEFT adapts the experts of this model: leave dropout out, or name targets"
            raise SettingsError(
                "lora", f"cannot be used with this model: {problem}{hint}"
            ) from None
        self._check_parameters(model)
        return model

    def _check_parameters(self, model: nn.Module) -> None:
        """Raise SettingsError unless every parameter that the config names has an adapter."""
        wanted = getattr(self.config, "target_parameters", None) or ()
        names = [f".{base_name(name)}" for name, _ in model.named_parameters()]
        for target in wanted:
            if not any(name.endswith(f".{target}") for name in names):
                raise SettingsError("lora", f"names {target}, and the model has no such parameter")

    def _inject(self, config: Any, model: nn.Module, **options: Any) -> None:
        from peft import inject_adapter_in_model

        with warnings.catch_warnings():
            # GPT-2's linear layers have transposed weights: PEFT corrects the setting itself.
            warnings.filterwarnings("ignore", ".*fan_in_fan_out is set to False.*")
            # `lora_adapter` asks for it whether the model has tied weights or not.
            warnings.filterwarnings("ignore", "You have requested `ensure_weight_tying`.*")
            # PEFT writes these patterns itself, and uses them: their targets are parameters.
            warnings.filterwarnings("ignore", r".*_pattern keys did not match.*gate_up_proj.*")
            inject_adapter_in_model(config, model, adapter_name=self.name, **options)

    def is_own(self, name: str) -> bool:
        """Return whether a tensor exists only in the adapter, not in the model without it."""
        from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING

        prefix = PEFT_TYPE_TO_TUNER_MAPPING[self.config.peft_type].prefix
        return any(part.startswith(prefix) for part in name.split("."))

    def config_entry(self, name: str) -> str:
        """Return the entries of the config that say whether the adapter has a tensor, with values.

        `name` is one of PEFT's files.
        """
        if not self.is_own(name):
            entries = ["modules_to_save", *(["bias"] if name.endswith(".bias") else [])]
        elif "magnitude" in name:
            entries = ["use_dora"]
        elif name.endswith(".bias"):
            entries = ["lora_bias"]
        else:
            entries = ["target_modules", "target_parameters", "exclude_modules"]
            entries.append("layers_to_transform")
        values = {entry: _as_json(getattr(self.config, entry, None)) for entry in entries}
        stated = {entry: value for entry, value in values.items() if value or entry == entries[0]}
        return ", ".join(f"{entry}: {json.dumps(value)}" for entry, value in stated.items())

    def attach_to_twin(self, twin: nn.Module) -> None:
        """Put the same adapter into a model with other sizes; all its tensors are trained.

        Which of them the run trains is decided by the inventory's list of frozen tensors.
        """
        config = copy.deepcopy(self.config)
        config.inference_mode = False
        if hasattr(config, "init_lora_weights"):
            config.init_lora_weights = True  # others need the weights or the data of the run
        self._inject(config, twin)
        for name, parameter in twin.named_parameters():
            parameter.requires_grad_(ORIGINAL not in name)

    def file_names(self, model: nn.Module) -> dict[str, str]:
        """Return the name in PEFT's files of each tensor that these files have.

        `model` is the transformers model with the adapter.
        """
        from peft import get_peft_model_state_dict

        # PEFT selects and renames entries of a state dict, and keeps the values.
        own = {WRAPPER + name: name for name in model.state_dict()}
        found: Mapping[str, Any] = get_peft_model_state_dict(
            _Wrapper.around(model), state_dict=own, adapter_name=self.name,
            save_embedding_layers=False,
        )  # fmt: skip
        return {str(name): saved for saved, name in found.items()}


def base_name(name: str) -> str:
    """Return the name of a tensor in the model without the adapter.

    A tensor of the adapter itself keeps its name. A copy that is trained has the name of the tensor
    that it is a copy of.
    """
    if COPIES in name:
        module, _, rest = name.partition(COPIES)
        name = f"{module}.{rest.partition('.')[2]}"
    while BASE_LAYER in name:  # several adapters of parameters of one module are nested
        name = name.replace(BASE_LAYER, ".")
    return name.replace(ORIGINAL, ".")


def lora_adapter(options: LoraOptions) -> Adapter:
    """Return the adapter that `--lora` describes.

    Raises SettingsError if PEFT is not installed.
    """
    try:
        from peft import LoraConfig
    except ImportError:
        raise SettingsError(
            "lora", "needs the package peft, which is not installed: run `pip install peft`"
        ) from None
    named = [] if options.targets == ("none",) else list(options.targets)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=options.r,
        lora_alpha=options.scale,  # type: ignore[arg-type]
        target_modules="all-linear" if named == ["all-linear"] else named,
        target_parameters=list(options.parameters) or None,
        exclude_modules=list(options.exclude) or None,
        layers_to_transform=list(options.layers) or None,
        modules_to_save=list(options.save) or None,
        lora_dropout=options.dropout,
        bias=options.bias,
        init_lora_weights=True if options.init == "default" else options.init,
        use_rslora=options.rslora,
        # A copy of an embedding that is tied to the head is one for both, as in the model.
        ensure_weight_tying=bool(options.save),
    )
    return Adapter("default", config)


def find_adapter(model: nn.Module) -> Adapter | None:
    """Return the adapter in a transformers model; None if it has none."""
    configs: Any = getattr(model, "peft_config", None)
    if not isinstance(configs, Mapping) or not configs:
        return None
    (name, config), *_ = configs.items()
    return Adapter(name, config)


def without_wrapper(model: nn.Module) -> nn.Module:
    """Return the transformers model in a PEFT model; any other model is returned as it is.

    Raises UnsupportedModelError if Penstock cannot train the adapter.
    """
    if "peft" not in sys.modules:  # then no object is PEFT's
        return model
    from peft import PeftMixedModel, PeftModel

    if isinstance(model, PeftMixedModel):
        raise UnsupportedModelError(
            "a PeftMixedModel has adapters of several methods, and Penstock trains one adapter"
        )
    if isinstance(model, PeftModel):
        _check_method(model.active_peft_config)
        inner: nn.Module = model.get_base_model()
    else:
        inner = model
    _check_state(inner)
    return inner


def _check_method(config: Any) -> None:
    """Raise UnsupportedModelError unless the method changes layers and nothing else."""
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
    from peft.tuners.tuners_utils import BaseTuner

    method = str(getattr(config.peft_type, "value", config.peft_type))
    tuner: Any = PEFT_TYPE_TO_TUNER_MAPPING.get(config.peft_type)
    problem = ""
    if config.is_prompt_learning or config.is_adaption_prompt:
        problem = (
            "it adds trained tokens, or keys and values, to the input of the model or of attention"
        )
    elif not (isinstance(tuner, type) and issubclass(tuner, BaseTuner)):
        problem = "Penstock does not know what it computes"
    elif tuner.uses_shared_state:
        problem = "its layers share tensors, and Penstock loads and trains each layer separately"
    elif tuner.forward is not BaseTuner.forward:
        problem = (
            "it computes more than the layers of the model do, such as a further term of the loss, "
            "a choice between experts, or ranks that change during training"
        )
    elif getattr(config, "alora_invocation_tokens", None):
        problem = "alora_invocation_tokens let an adapter depend on where tokens are in the input"
    elif getattr(config, "trainable_token_indices", None):
        problem = (
            "trainable_token_indices trains rows of the embedding; use "
            "modules_to_save=['embed_tokens'], which trains all of them"
        )
    if problem:
        raise UnsupportedModelError(
            f"Penstock cannot train this adapter ({method}): {problem}. Adapters that are part of "
            f"layers, such as LoRA, can be trained"
        )


def _check_state(model: nn.Module) -> None:
    """Raise UnsupportedModelError unless one adapter is active and can be trained."""
    adapter = find_adapter(model)
    if adapter is None:
        return
    _check_method(adapter.config)
    configs: Any = model.peft_config
    if len(configs) > 1:
        raise UnsupportedModelError(
            f"the model has {len(configs)} adapters ({', '.join(configs)}), and Penstock trains a "
            f"model with one; remove the others with delete_adapter"
        )
    from peft.tuners.tuners_utils import BaseTunerLayer

    for path, module in model.named_modules():
        if not isinstance(module, BaseTunerLayer):
            continue
        if module.merged:
            raise UnsupportedModelError(
                f"the adapter is merged into the weights of {path}; call unmerge_adapter() first"
            )
        if module.disable_adapters:
            raise UnsupportedModelError(
                f"the adapter of {path} is disabled; call enable_adapter_layers() first"
            )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UnsupportedModelError(
            "no tensor of the adapter is trained: it was loaded for inference. Load it with "
            "PeftModel.from_pretrained(..., is_trainable=True)"
        )


class _Wrapper:
    """Stands for the PEFT model around a transformers model, for PEFT's own functions."""

    @staticmethod
    def around(model: nn.Module) -> nn.Module:
        """Return a module in which the tensors of the model have the names of a PEFT model."""
        from torch import nn

        outer, inner = nn.Module(), nn.Module()
        inner.model = model
        outer.base_model = inner
        outer.peft_config, outer.config = model.peft_config, model.config
        return outer


def _as_json(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, Mapping):
        return {str(k): _as_json(v) for k, v in value.items()}
    return value if isinstance(value, int | float | str | bool | list | type(None)) else str(value)
