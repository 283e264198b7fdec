"""The target's configuration. Every key that changes the forward is implemented here or refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from transformers import LlamaConfig, Qwen3Config

from service_kit.checkpoint import Checkpoint
from service_kit.errors import ConfigurationError
from service_kit.rope import rope_tables

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_CONFIG_CLASSES: dict[str, Any] = {"llama": LlamaConfig, "qwen3": Qwen3Config}
"""Named here, as AutoConfig takes a second to find them."""

_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "pretraining_tp": (1, None),
    "partial_rotary_factor": (1, None),
    "rope_interleaved": (False, None),
    "quantization_config": (None,),
    "final_logit_softcapping": (None,),
    "attn_logit_softcapping": (None,),
    "clip_qkv": (None,),
    "query_pre_attn_scalar": (None,),
    "attention_multiplier": (None,),
    "embedding_multiplier": (1, None),
    "residual_multiplier": (1, None),
    "logits_scaling": (1, None),
    "logit_scale": (1, None),
    "no_rope_layers": ([], None),
    "num_experts": (0, None),
    "num_local_experts": (0, None),
}
"""Keys of related models that would change the forward, with the values that do not."""


class SamplingDefaults(NamedTuple):
    """What generation_config.json recommends; None where it says nothing."""

    temperature: float | None = None
    """0 when it turns sampling off."""
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True)
class TargetConfig:
    """Sizes and variants of a Llama- or Qwen3-style decoder."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    """Longest context, in tokens."""
    has_attention_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    is_tied: bool
    """Whether lm_head is the embedding."""
    windows: tuple[int, ...]
    """Per layer: sliding window in positions, 0 for full attention."""
    eos_token_ids: tuple[int, ...]
    sampling_defaults: SamplingDefaults
    rope_source: Any
    """The `transformers` configuration, for `service_kit.rope`."""

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> TargetConfig:
        """Reads config.json and generation_config.json. Raises ConfigurationError naming the key at fault."""
        raw = checkpoint.config
        _refuse_foreign(checkpoint.name, raw)
        try:
            config_class = _CONFIG_CLASSES[raw["model_type"]]
            source = config_class.from_pretrained(checkpoint.directory, local_files_only=True)
        except Exception as error:  # its validators raise many kinds; each one means a bad config.json
            raise ConfigurationError(f"{checkpoint.name}: config.json: {error}", field="model") from error
        num_heads, num_kv_heads, head_dim = source.num_attention_heads, source.num_key_value_heads, source.head_dim
        if num_heads % num_kv_heads or head_dim % 2:
            raise ConfigurationError(
                f"{checkpoint.name}: num_attention_heads {num_heads} must be a multiple of num_key_value_heads "
                f"{num_kv_heads}, and head_dim {head_dim} even",
                field="model",
            )
        rope_tables(source, 1)  # refuses what it does not implement, before weights are read
        is_qwen3 = source.model_type == "qwen3"
        generation = checkpoint.read_json("generation_config.json")
        return cls(
            vocab_size=source.vocab_size,
            hidden_size=source.hidden_size,
            intermediate_size=source.intermediate_size,
            num_layers=source.num_hidden_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=source.rms_norm_eps,
            max_position=source.max_position_embeddings,
            has_attention_bias=bool(source.attention_bias),
            has_mlp_bias=not is_qwen3 and bool(source.mlp_bias),
            has_qk_norm=is_qwen3,
            is_tied=bool(source.tie_word_embeddings),
            windows=_windows(checkpoint.name, source, is_qwen3),
            eos_token_ids=_eos_token_ids(checkpoint.name, generation, source),
            sampling_defaults=_sampling_defaults(checkpoint.name, generation),
            rope_source=source,
        )


def _refuse_foreign(name: str, raw: Mapping[str, Any]) -> None:
    model_type = raw.get("model_type")
    if model_type not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise ConfigurationError(f"{name}: model_type {model_type!r} is not served: only {known}", field="model")
    architectures = raw.get("architectures") or [_ARCHITECTURES[model_type]]
    if architectures != [_ARCHITECTURES[model_type]]:
        raise ConfigurationError(
            f"{name}: architectures {architectures} is not served: for model_type {model_type!r} only "
            f"{_ARCHITECTURES[model_type]}",
            field="model",
        )
    for key, neutral in _NEUTRAL_VALUES.items():
        if key in raw and raw[key] not in neutral:
            value = "is set" if isinstance(raw[key], dict) else repr(raw[key])
            raise ConfigurationError(f"{name}: {key} {value} is not implemented: only {neutral[0]!r}", field="model")
    if model_type == "qwen3" and raw.get("mlp_bias"):
        raise ConfigurationError(f"{name}: mlp_bias is not implemented for qwen3", field="model")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if any(isinstance(value, dict) for value in rope.values()):
        raise ConfigurationError(f"{name}: rope_parameters per layer type are not implemented", field="model")


def _windows(name: str, source: Any, is_qwen3: bool) -> tuple[int, ...]:
    window = getattr(source, "sliding_window", None)
    if not is_qwen3 and window is not None and getattr(source, "use_sliding_window", True):
        raise ConfigurationError(f"{name}: sliding_window {window} is not implemented for llama", field="model")
    layer_types = getattr(source, "layer_types", None) or ["full_attention"] * source.num_hidden_layers
    if len(layer_types) != source.num_hidden_layers:
        raise ConfigurationError(
            f"{name}: layer_types has {len(layer_types)} entries for {source.num_hidden_layers} layers", field="model"
        )
    windows = []
    for layer_type in layer_types:
        if layer_type == "full_attention":
            windows.append(0)
        elif layer_type == "sliding_attention" and is_qwen3 and window:
            windows.append(int(window))
        else:
            raise ConfigurationError(
                f"{name}: layer_types entry {layer_type!r} with sliding_window {window} is not implemented",
                field="model",
            )
    return tuple(windows)


def _eos_token_ids(name: str, generation: Mapping[str, Any], source: Any) -> tuple[int, ...]:
    ids = generation.get("eos_token_id", getattr(source, "eos_token_id", None))
    ids = [] if ids is None else [ids] if isinstance(ids, int) else ids
    if not all(isinstance(token, int) and 0 <= token < source.vocab_size for token in ids):
        raise ConfigurationError(f"{name}: eos_token_id {ids} is outside the vocabulary", field="model")
    return tuple(ids)


def _sampling_defaults(name: str, generation: Mapping[str, Any]) -> SamplingDefaults:
    is_greedy = generation.get("do_sample") is False  # which leaves penalties in force
    names = ("repetition_penalty",) if is_greedy else SamplingDefaults._fields
    values = {key: generation.get(key) for key in names}
    limits = {
        "temperature": (0, 100),
        "top_k": (0, 2**31),
        "top_p": (0, 1),
        "min_p": (0, 1),
        "repetition_penalty": (1 / 64, 64),
    }
    for key, value in values.items():
        low, high = limits[key]
        if value is not None and not (isinstance(value, int | float) and low <= value <= high):
            raise ConfigurationError(
                f"{name}: generation_config.json: {key} {value!r} is not between {low} and {high}", field="model"
            )
    defaults = SamplingDefaults(**values)
    return defaults._replace(temperature=0.0) if is_greedy else defaults
