from dspark.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DrafterServiceGetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrafterServiceGetInfoResponse(_message.Message):
    __slots__ = ("contract_version", "model", "fingerprint", "epoch", "block_size", "elastic_block_sizes", "target_vocab_size", "draft_vocab_size", "target_hidden_size", "target_layer_ids", "num_target_layers", "page_bytes", "page_size", "has_confidence_head", "weight_format", "device", "calibration", "publishes_blocks")
    CONTRACT_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    ELASTIC_BLOCK_SIZES_FIELD_NUMBER: _ClassVar[int]
    TARGET_VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    TARGET_HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    TARGET_LAYER_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_TARGET_LAYERS_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    HAS_CONFIDENCE_HEAD_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FORMAT_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    CALIBRATION_FIELD_NUMBER: _ClassVar[int]
    PUBLISHES_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    contract_version: int
    model: str
    fingerprint: str
    epoch: int
    block_size: int
    elastic_block_sizes: _containers.RepeatedScalarFieldContainer[int]
    target_vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    target_layer_ids: _containers.RepeatedScalarFieldContainer[int]
    num_target_layers: int
    page_bytes: int
    page_size: int
    has_confidence_head: bool
    weight_format: str
    device: str
    calibration: str
    publishes_blocks: bool
    def __init__(self, contract_version: _Optional[int] = ..., model: _Optional[str] = ..., fingerprint: _Optional[str] = ..., epoch: _Optional[int] = ..., block_size: _Optional[int] = ..., elastic_block_sizes: _Optional[_Iterable[int]] = ..., target_vocab_size: _Optional[int] = ..., draft_vocab_size: _Optional[int] = ..., target_hidden_size: _Optional[int] = ..., target_layer_ids: _Optional[_Iterable[int]] = ..., num_target_layers: _Optional[int] = ..., page_bytes: _Optional[int] = ..., page_size: _Optional[int] = ..., has_confidence_head: _Optional[bool] = ..., weight_format: _Optional[str] = ..., device: _Optional[str] = ..., calibration: _Optional[str] = ..., publishes_blocks: _Optional[bool] = ...) -> None: ...

class DrafterServiceAttachRequest(_message.Message):
    __slots__ = ("session", "num_slots", "num_pages", "max_model_len", "features_arena", "kv_page_bytes")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    FEATURES_ARENA_FIELD_NUMBER: _ClassVar[int]
    KV_PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    session: int
    num_slots: int
    num_pages: int
    max_model_len: int
    features_arena: str
    kv_page_bytes: int
    def __init__(self, session: _Optional[int] = ..., num_slots: _Optional[int] = ..., num_pages: _Optional[int] = ..., max_model_len: _Optional[int] = ..., features_arena: _Optional[str] = ..., kv_page_bytes: _Optional[int] = ...) -> None: ...

class DrafterServiceAttachResponse(_message.Message):
    __slots__ = ("epoch", "draft_probs_arena", "draft_to_target_arena", "blocks_arena")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DRAFT_PROBS_ARENA_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TO_TARGET_ARENA_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_ARENA_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    draft_probs_arena: str
    draft_to_target_arena: str
    blocks_arena: str
    def __init__(self, epoch: _Optional[int] = ..., draft_probs_arena: _Optional[str] = ..., draft_to_target_arena: _Optional[str] = ..., blocks_arena: _Optional[str] = ...) -> None: ...

class DraftRequest(_message.Message):
    __slots__ = ("session", "epoch", "step_id", "slots", "ingest_slots", "ingest_starts", "ingest_counts", "ingest_oldest_step_ids", "ingest_newest_step_ids", "row_slots", "row_anchor_ids", "row_anchor_positions", "row_rounds", "num_draft_tokens", "publishes_blocks", "confidence_odds")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    INGEST_SLOTS_FIELD_NUMBER: _ClassVar[int]
    INGEST_STARTS_FIELD_NUMBER: _ClassVar[int]
    INGEST_COUNTS_FIELD_NUMBER: _ClassVar[int]
    INGEST_OLDEST_STEP_IDS_FIELD_NUMBER: _ClassVar[int]
    INGEST_NEWEST_STEP_IDS_FIELD_NUMBER: _ClassVar[int]
    ROW_SLOTS_FIELD_NUMBER: _ClassVar[int]
    ROW_ANCHOR_IDS_FIELD_NUMBER: _ClassVar[int]
    ROW_ANCHOR_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    ROW_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PUBLISHES_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCE_ODDS_FIELD_NUMBER: _ClassVar[int]
    session: int
    epoch: int
    step_id: int
    slots: _types_pb2.SlotUpdates
    ingest_slots: _containers.RepeatedScalarFieldContainer[int]
    ingest_starts: _containers.RepeatedScalarFieldContainer[int]
    ingest_counts: _containers.RepeatedScalarFieldContainer[int]
    ingest_oldest_step_ids: _containers.RepeatedScalarFieldContainer[int]
    ingest_newest_step_ids: _containers.RepeatedScalarFieldContainer[int]
    row_slots: _containers.RepeatedScalarFieldContainer[int]
    row_anchor_ids: _containers.RepeatedScalarFieldContainer[int]
    row_anchor_positions: _containers.RepeatedScalarFieldContainer[int]
    row_rounds: _containers.RepeatedScalarFieldContainer[int]
    num_draft_tokens: int
    publishes_blocks: bool
    confidence_odds: bytes
    def __init__(self, session: _Optional[int] = ..., epoch: _Optional[int] = ..., step_id: _Optional[int] = ..., slots: _Optional[_Union[_types_pb2.SlotUpdates, _Mapping]] = ..., ingest_slots: _Optional[_Iterable[int]] = ..., ingest_starts: _Optional[_Iterable[int]] = ..., ingest_counts: _Optional[_Iterable[int]] = ..., ingest_oldest_step_ids: _Optional[_Iterable[int]] = ..., ingest_newest_step_ids: _Optional[_Iterable[int]] = ..., row_slots: _Optional[_Iterable[int]] = ..., row_anchor_ids: _Optional[_Iterable[int]] = ..., row_anchor_positions: _Optional[_Iterable[int]] = ..., row_rounds: _Optional[_Iterable[int]] = ..., num_draft_tokens: _Optional[int] = ..., publishes_blocks: _Optional[bool] = ..., confidence_odds: _Optional[bytes] = ...) -> None: ...

class DraftResponse(_message.Message):
    __slots__ = ("token_ids", "confidences", "ingest_failures", "timings", "draft_probs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCES_FIELD_NUMBER: _ClassVar[int]
    INGEST_FAILURES_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_PROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    confidences: bytes
    ingest_failures: _containers.RepeatedCompositeFieldContainer[_types_pb2.RowFailure]
    timings: _containers.RepeatedCompositeFieldContainer[_types_pb2.PhaseTiming]
    draft_probs: bytes
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., confidences: _Optional[bytes] = ..., ingest_failures: _Optional[_Iterable[_Union[_types_pb2.RowFailure, _Mapping]]] = ..., timings: _Optional[_Iterable[_Union[_types_pb2.PhaseTiming, _Mapping]]] = ..., draft_probs: _Optional[bytes] = ...) -> None: ...
