from dspark.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VerifierServiceGetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VerifierServiceGetInfoResponse(_message.Message):
    __slots__ = ("contract_version", "model", "fingerprint", "epoch", "vocab_size", "hidden_size", "num_layers", "max_position", "page_bytes", "page_size", "eos_token_ids", "weight_format", "device", "padded_rows", "sampling_defaults", "weight_format_reason", "inexact_reason", "sets_verify_lens")
    CONTRACT_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    MAX_POSITION_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FORMAT_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    PADDED_ROWS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FORMAT_REASON_FIELD_NUMBER: _ClassVar[int]
    INEXACT_REASON_FIELD_NUMBER: _ClassVar[int]
    SETS_VERIFY_LENS_FIELD_NUMBER: _ClassVar[int]
    contract_version: int
    model: str
    fingerprint: str
    epoch: int
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_position: int
    page_bytes: int
    page_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    weight_format: str
    device: str
    padded_rows: _containers.RepeatedScalarFieldContainer[int]
    sampling_defaults: SamplingDefaults
    weight_format_reason: str
    inexact_reason: str
    sets_verify_lens: bool
    def __init__(self, contract_version: _Optional[int] = ..., model: _Optional[str] = ..., fingerprint: _Optional[str] = ..., epoch: _Optional[int] = ..., vocab_size: _Optional[int] = ..., hidden_size: _Optional[int] = ..., num_layers: _Optional[int] = ..., max_position: _Optional[int] = ..., page_bytes: _Optional[int] = ..., page_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., weight_format: _Optional[str] = ..., device: _Optional[str] = ..., padded_rows: _Optional[_Iterable[int]] = ..., sampling_defaults: _Optional[_Union[SamplingDefaults, _Mapping]] = ..., weight_format_reason: _Optional[str] = ..., inexact_reason: _Optional[str] = ..., sets_verify_lens: _Optional[bool] = ...) -> None: ...

class SamplingDefaults(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ...) -> None: ...

class VerifierServiceAttachRequest(_message.Message):
    __slots__ = ("session", "num_slots", "num_pages", "max_model_len", "max_batch_tokens", "feature_ring_rows", "draft_probs_arena", "max_draft_tokens", "feature_layer_ids", "draft_to_target_arena", "masks_arena", "blocks_arena", "kv_page_bytes")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FEATURE_RING_ROWS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_PROBS_ARENA_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FEATURE_LAYER_IDS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TO_TARGET_ARENA_FIELD_NUMBER: _ClassVar[int]
    MASKS_ARENA_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_ARENA_FIELD_NUMBER: _ClassVar[int]
    KV_PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    session: int
    num_slots: int
    num_pages: int
    max_model_len: int
    max_batch_tokens: int
    feature_ring_rows: int
    draft_probs_arena: str
    max_draft_tokens: int
    feature_layer_ids: _containers.RepeatedScalarFieldContainer[int]
    draft_to_target_arena: str
    masks_arena: str
    blocks_arena: str
    kv_page_bytes: int
    def __init__(self, session: _Optional[int] = ..., num_slots: _Optional[int] = ..., num_pages: _Optional[int] = ..., max_model_len: _Optional[int] = ..., max_batch_tokens: _Optional[int] = ..., feature_ring_rows: _Optional[int] = ..., draft_probs_arena: _Optional[str] = ..., max_draft_tokens: _Optional[int] = ..., feature_layer_ids: _Optional[_Iterable[int]] = ..., draft_to_target_arena: _Optional[str] = ..., masks_arena: _Optional[str] = ..., blocks_arena: _Optional[str] = ..., kv_page_bytes: _Optional[int] = ...) -> None: ...

class VerifierServiceAttachResponse(_message.Message):
    __slots__ = ("epoch", "features_arena")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FEATURES_ARENA_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    features_arena: str
    def __init__(self, epoch: _Optional[int] = ..., features_arena: _Optional[str] = ...) -> None: ...

class StepRequest(_message.Message):
    __slots__ = ("session", "epoch", "step_id", "slots", "row_slots", "row_starts", "row_num_tokens", "row_num_drafts", "row_emits", "row_rounds", "token_ids", "row_chained", "prob_rows", "prob_positions", "prob_token_ids", "row_masked", "block_rows", "block_max_drafts", "block_weights", "verify_budget")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    ROW_SLOTS_FIELD_NUMBER: _ClassVar[int]
    ROW_STARTS_FIELD_NUMBER: _ClassVar[int]
    ROW_NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROW_NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    ROW_EMITS_FIELD_NUMBER: _ClassVar[int]
    ROW_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ROW_CHAINED_FIELD_NUMBER: _ClassVar[int]
    PROB_ROWS_FIELD_NUMBER: _ClassVar[int]
    PROB_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    PROB_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ROW_MASKED_FIELD_NUMBER: _ClassVar[int]
    BLOCK_ROWS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_MAX_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_BUDGET_FIELD_NUMBER: _ClassVar[int]
    session: int
    epoch: int
    step_id: int
    slots: _types_pb2.SlotUpdates
    row_slots: _containers.RepeatedScalarFieldContainer[int]
    row_starts: _containers.RepeatedScalarFieldContainer[int]
    row_num_tokens: _containers.RepeatedScalarFieldContainer[int]
    row_num_drafts: _containers.RepeatedScalarFieldContainer[int]
    row_emits: _containers.RepeatedScalarFieldContainer[bool]
    row_rounds: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    row_chained: _containers.RepeatedScalarFieldContainer[bool]
    prob_rows: _containers.RepeatedScalarFieldContainer[int]
    prob_positions: _containers.RepeatedScalarFieldContainer[int]
    prob_token_ids: _containers.RepeatedScalarFieldContainer[int]
    row_masked: _containers.RepeatedScalarFieldContainer[bool]
    block_rows: _containers.RepeatedScalarFieldContainer[int]
    block_max_drafts: _containers.RepeatedScalarFieldContainer[int]
    block_weights: _containers.RepeatedScalarFieldContainer[float]
    verify_budget: int
    def __init__(self, session: _Optional[int] = ..., epoch: _Optional[int] = ..., step_id: _Optional[int] = ..., slots: _Optional[_Union[_types_pb2.SlotUpdates, _Mapping]] = ..., row_slots: _Optional[_Iterable[int]] = ..., row_starts: _Optional[_Iterable[int]] = ..., row_num_tokens: _Optional[_Iterable[int]] = ..., row_num_drafts: _Optional[_Iterable[int]] = ..., row_emits: _Optional[_Iterable[bool]] = ..., row_rounds: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., row_chained: _Optional[_Iterable[bool]] = ..., prob_rows: _Optional[_Iterable[int]] = ..., prob_positions: _Optional[_Iterable[int]] = ..., prob_token_ids: _Optional[_Iterable[int]] = ..., row_masked: _Optional[_Iterable[bool]] = ..., block_rows: _Optional[_Iterable[int]] = ..., block_max_drafts: _Optional[_Iterable[int]] = ..., block_weights: _Optional[_Iterable[float]] = ..., verify_budget: _Optional[int] = ...) -> None: ...

class StepResponse(_message.Message):
    __slots__ = ("verify_lens", "accepted_lens", "token_ids", "failures", "timings", "scores", "prompt_scores", "target_probs")
    VERIFY_LENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_LENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_SCORES_FIELD_NUMBER: _ClassVar[int]
    TARGET_PROBS_FIELD_NUMBER: _ClassVar[int]
    verify_lens: _containers.RepeatedScalarFieldContainer[int]
    accepted_lens: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    failures: _containers.RepeatedCompositeFieldContainer[_types_pb2.RowFailure]
    timings: _containers.RepeatedCompositeFieldContainer[_types_pb2.PhaseTiming]
    scores: _containers.RepeatedCompositeFieldContainer[RowScores]
    prompt_scores: _containers.RepeatedCompositeFieldContainer[RowScores]
    target_probs: bytes
    def __init__(self, verify_lens: _Optional[_Iterable[int]] = ..., accepted_lens: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., failures: _Optional[_Iterable[_Union[_types_pb2.RowFailure, _Mapping]]] = ..., timings: _Optional[_Iterable[_Union[_types_pb2.PhaseTiming, _Mapping]]] = ..., scores: _Optional[_Iterable[_Union[RowScores, _Mapping]]] = ..., prompt_scores: _Optional[_Iterable[_Union[RowScores, _Mapping]]] = ..., target_probs: _Optional[bytes] = ...) -> None: ...

class RowScores(_message.Message):
    __slots__ = ("row", "scores")
    ROW_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    row: int
    scores: _containers.RepeatedCompositeFieldContainer[_types_pb2.TokenScore]
    def __init__(self, row: _Optional[int] = ..., scores: _Optional[_Iterable[_Union[_types_pb2.TokenScore, _Mapping]]] = ...) -> None: ...

class ProfileRequest(_message.Message):
    __slots__ = ("num_tokens", "context_len", "repeats")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LEN_FIELD_NUMBER: _ClassVar[int]
    REPEATS_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    context_len: int
    repeats: int
    def __init__(self, num_tokens: _Optional[int] = ..., context_len: _Optional[int] = ..., repeats: _Optional[int] = ...) -> None: ...

class ProfileResponse(_message.Message):
    __slots__ = ("forward_ns",)
    FORWARD_NS_FIELD_NUMBER: _ClassVar[int]
    forward_ns: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, forward_ns: _Optional[_Iterable[int]] = ...) -> None: ...
