"""Configuration of a DSpark drafter in the DeepSpec format: `config.json` read, checked, and put in our words.

The file is the configuration of a Llama or Qwen3 decoder with the DSpark keys beside it. Other formats that carry
DSpark drafters use other slot and layer conventions, so they are refused by name rather than half understood.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from transformers import LlamaConfig, Qwen3Config

from service_kit.errors import ConfigurationError

MarkovHeadType = Literal["vanilla", "gated", "rnn"]

_FAMILIES: dict[str, tuple[type[LlamaConfig] | type[Qwen3Config], bool]] = {
    "Qwen3DSparkModel": (Qwen3Config, True),
    "LlamaDSparkModel": (LlamaConfig, False),
}
"""Architecture → class of the layers' configuration, and whether heads have q/k norms."""

_FOREIGN_FORMATS: dict[str, tuple[str, ...]] = {
    "the speculators format": ("speculators_model_type", "speculators_config", "transformer_layer_config"),
    "the DeepSeek-V4 format (a drafter inside its target's checkpoint)": ("dspark_block_size", "n_mtp_layers"),
    "the Gemma 4 format": ("target_text_model_type",),
    "the SpecForge format": ("dflash_config", "dspark_config", "auto_map"),
}
"""Format → keys that only it has."""

_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "sample_from_anchor": (True,),
    "dspark_bonus_anchor": (False,),
    "causal": (False,),
    "hidden_act": ("silu",),
    "final_logit_softcapping": (None,),
    "attn_logit_softcapping": (None,),
    "attention_k_eq_v": (False, None),
    "layer_scalar": (None,),
    "attention_multiplier": (None,),
    "residual_multiplier": (1.0, None),
    "embedding_multiplier": (1.0, None),
    "logits_scaling": (1.0, None),
    "num_experts": (0, None),
}
"""Keys that change the forward in a way that is not implemented → values that leave it as it is."""


@dataclass(frozen=True)
class DrafterConfig:
    """A drafter's geometry and heads. Layer ids count the target's layers from 0; an id means that layer's output."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    has_qk_norm: bool
    attention_bias: bool
    mlp_bias: bool
    windows: tuple[int, ...]
    """Sliding window of each layer, in positions; 0 for full attention."""
    vocab_size: int
    """Vocabulary of the target."""
    draft_vocab_size: int
    """Tokens that can be drafted."""
    block_size: int
    elastic_block_sizes: tuple[int, ...]
    """Block lengths it was trained for, ascending; the last one is block_size."""
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    markov_rank: int
    markov_head_type: MarkovHeadType | None
    """None: drafts depend on the block's hidden states only."""
    has_confidence_head: bool
    confidence_has_markov: bool
    """Whether the confidence head also reads the Markov embedding of the token before."""
    decoder: Any
    """The layers' `transformers` configuration: the source of the rotary tables."""

    @property
    def is_vocab_reduced(self) -> bool:
        """Whether some target tokens cannot be drafted."""
        return self.draft_vocab_size < self.vocab_size

    @property
    def feature_size(self) -> int:
        """Width of a feature row: hidden states of all feature layers."""
        return len(self.target_layer_ids) * self.hidden_size

    def block_len_for(self, num_drafts: int) -> int:
        """Slots to compute for `num_drafts` drafts: the shortest block it was trained for that holds them."""
        return next(size for size in self.elastic_block_sizes if size >= num_drafts)


def parse_config(raw: Mapping[str, Any]) -> DrafterConfig:
    """Reads the content of a DeepSpec `config.json`.

    Raises ConfigurationError naming the format, the architecture or the key that cannot be served.
    """
    _refuse_foreign_formats(raw)
    architecture = next(iter(raw.get("architectures") or ()), None)
    if architecture not in _FAMILIES:
        raise ConfigurationError(
            f"drafter architecture {architecture} is not implemented: one of {', '.join(_FAMILIES)} is",
            field="architectures",
        )
    for key, neutral in _NEUTRAL_VALUES.items():
        if key in raw and raw[key] not in neutral:
            raise ConfigurationError(
                f"drafter {key} {raw[key]!r} is not implemented: only {neutral[0]!r} is", field=key
            )
    config_class, has_qk_norm = _FAMILIES[architecture]
    decoder: Any
    try:
        decoder = config_class.from_dict(dict(raw))
    except Exception as error:  # the class validates with errors of many kinds; each one means: unreadable
        reason = " ".join(str(error).split())
        raise ConfigurationError(f"drafter config.json is not a {architecture} configuration: {reason}") from error
    block_size = _positive(raw, "block_size")
    markov_rank, markov_head_type = _markov(raw)
    has_confidence_head = bool(raw.get("enable_confidence_head", False))
    confidence_has_markov = has_confidence_head and bool(raw.get("confidence_head_with_markov", False))
    if confidence_has_markov and markov_head_type is None:
        raise ConfigurationError(
            "drafter confidence_head_with_markov is true without a Markov head: set markov_rank above 0",
            field="confidence_head_with_markov",
        )
    config = DrafterConfig(
        hidden_size=decoder.hidden_size,
        intermediate_size=decoder.intermediate_size,
        num_layers=decoder.num_hidden_layers,
        num_heads=decoder.num_attention_heads,
        num_kv_heads=decoder.num_key_value_heads,
        head_dim=decoder.head_dim,
        norm_eps=decoder.rms_norm_eps,
        has_qk_norm=has_qk_norm,
        attention_bias=bool(decoder.attention_bias),
        mlp_bias=bool(getattr(decoder, "mlp_bias", False)),
        windows=_windows(decoder),
        vocab_size=decoder.vocab_size,
        draft_vocab_size=_positive(raw, "draft_vocab_size", default=decoder.vocab_size),
        block_size=block_size,
        elastic_block_sizes=tuple(sorted({*_ids(raw, "elastic_block_sizes", default=[block_size]), block_size})),
        mask_token_id=_ids(raw, "mask_token_id")[0],
        target_layer_ids=_ids(raw, "target_layer_ids"),
        num_target_layers=_positive(raw, "num_target_layers"),
        markov_rank=markov_rank,
        markov_head_type=markov_head_type,
        has_confidence_head=has_confidence_head,
        confidence_has_markov=confidence_has_markov,
        decoder=decoder,
    )
    _check_ranges(config)
    return config


def _refuse_foreign_formats(raw: Mapping[str, Any]) -> None:
    for name, keys in _FOREIGN_FORMATS.items():
        if key := next((key for key in keys if key in raw), None):
            raise ConfigurationError(
                f"the drafter is in {name} (its config.json has {key}): only the DeepSpec format is implemented",
                field=key,
            )


def _positive(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigurationError(f"drafter {key} must be a positive integer, not {value!r}", field=key)
    return value


def _ids(raw: Mapping[str, Any], key: str, default: list[int] | None = None) -> tuple[int, ...]:
    value = raw.get(key, default)
    values = value if isinstance(value, list) else [value]
    if not values or any(not isinstance(each, int) or isinstance(each, bool) for each in values):
        raise ConfigurationError(f"drafter {key} must be integers, not {value!r}", field=key)
    return tuple(values)


def _markov(raw: Mapping[str, Any]) -> tuple[int, MarkovHeadType | None]:
    rank = raw.get("markov_rank") or 0
    if rank == 0:
        return 0, None
    head_type = raw.get("markov_head_type", "vanilla")
    if head_type not in get_args(MarkovHeadType):
        raise ConfigurationError(
            f"drafter markov_head_type {head_type!r} is not implemented: one of "
            f"{', '.join(get_args(MarkovHeadType))} is",
            field="markov_head_type",
        )
    return _positive(raw, "markov_rank"), head_type


def _windows(decoder: Any) -> tuple[int, ...]:
    layer_types = getattr(decoder, "layer_types", None) or ["full_attention"] * decoder.num_hidden_layers
    if len(layer_types) != decoder.num_hidden_layers:
        raise ConfigurationError(
            f"drafter layer_types has {len(layer_types)} entries for num_hidden_layers {decoder.num_hidden_layers}",
            field="layer_types",
        )
    windows = []
    for layer_type in layer_types:
        if layer_type == "full_attention":
            windows.append(0)
        elif layer_type == "sliding_attention":
            windows.append(getattr(decoder, "sliding_window", None) or 0)
            if not windows[-1]:
                raise ConfigurationError(
                    "drafter layer_types has sliding_attention but there is no window in force: set sliding_window "
                    "(and use_sliding_window true for Qwen3)",
                    field="sliding_window",
                )
        else:
            raise ConfigurationError(
                f"drafter layer type {layer_type!r} is not implemented: full_attention and sliding_attention are",
                field="layer_types",
            )
    return tuple(windows)


def _check_ranges(config: DrafterConfig) -> None:
    sizes = config.elastic_block_sizes
    if sizes[0] < 1 or sizes[-1] != config.block_size:
        raise ConfigurationError(
            f"drafter elastic_block_sizes {list(sizes)} must lie in 1 ... block_size {config.block_size}",
            field="elastic_block_sizes",
        )
    if not 0 <= config.mask_token_id < config.vocab_size:
        raise ConfigurationError(
            f"drafter mask_token_id {config.mask_token_id} is outside its vocab_size {config.vocab_size}",
            field="mask_token_id",
        )
    if config.draft_vocab_size > config.vocab_size:
        raise ConfigurationError(
            f"drafter draft_vocab_size {config.draft_vocab_size} exceeds its vocab_size {config.vocab_size}",
            field="draft_vocab_size",
        )
    last = config.num_target_layers - 1
    for layer_id in config.target_layer_ids:
        if not 0 <= layer_id < last:
            raise ConfigurationError(
                f"drafter target_layer_ids holds {layer_id}: with {config.num_target_layers} target layers ids run "
                f"from 0 to {last - 1} (the last layer's output is only seen after the final norm)",
                field="target_layer_ids",
            )
