from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Regime(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REGIME_UNSPECIFIED: _ClassVar[Regime]
    REGIME_GREEDY: _ClassVar[Regime]
    REGIME_COUPLED: _ClassVar[Regime]
    REGIME_REJECTION: _ClassVar[Regime]
REGIME_UNSPECIFIED: Regime
REGIME_GREEDY: Regime
REGIME_COUPLED: Regime
REGIME_REJECTION: Regime

class SlotAdmission(_message.Message):
    __slots__ = ("slot", "regime", "temperature", "top_k", "top_p", "min_p", "key", "target")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    REGIME_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    slot: int
    regime: Regime
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    key: int
    target: TargetOptions
    def __init__(self, slot: _Optional[int] = ..., regime: _Optional[_Union[Regime, str]] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., key: _Optional[int] = ..., target: _Optional[_Union[TargetOptions, _Mapping]] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class TargetOptions(_message.Message):
    __slots__ = ("repetition_penalty", "frequency_penalty", "presence_penalty", "bias_token_ids", "bias_values", "banned_sequences", "min_tokens", "stop_token_ids", "text_token_ids", "num_prompt_tokens", "num_logprobs", "num_prompt_logprobs")
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    BIAS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BIAS_VALUES_FIELD_NUMBER: _ClassVar[int]
    BANNED_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    bias_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bias_values: _containers.RepeatedScalarFieldContainer[float]
    banned_sequences: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    text_token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_prompt_tokens: int
    num_logprobs: int
    num_prompt_logprobs: int
    def __init__(self, repetition_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., bias_token_ids: _Optional[_Iterable[int]] = ..., bias_values: _Optional[_Iterable[float]] = ..., banned_sequences: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., text_token_ids: _Optional[_Iterable[int]] = ..., num_prompt_tokens: _Optional[int] = ..., num_logprobs: _Optional[int] = ..., num_prompt_logprobs: _Optional[int] = ...) -> None: ...

class TokenScore(_message.Message):
    __slots__ = ("logprob", "rank", "top_token_ids", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    rank: int
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., rank: _Optional[int] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class SlotUpdates(_message.Message):
    __slots__ = ("releases", "admissions", "page_slots", "page_indices", "page_ids")
    RELEASES_FIELD_NUMBER: _ClassVar[int]
    ADMISSIONS_FIELD_NUMBER: _ClassVar[int]
    PAGE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    PAGE_INDICES_FIELD_NUMBER: _ClassVar[int]
    PAGE_IDS_FIELD_NUMBER: _ClassVar[int]
    releases: _containers.RepeatedScalarFieldContainer[int]
    admissions: _containers.RepeatedCompositeFieldContainer[SlotAdmission]
    page_slots: _containers.RepeatedScalarFieldContainer[int]
    page_indices: _containers.RepeatedScalarFieldContainer[int]
    page_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, releases: _Optional[_Iterable[int]] = ..., admissions: _Optional[_Iterable[_Union[SlotAdmission, _Mapping]]] = ..., page_slots: _Optional[_Iterable[int]] = ..., page_indices: _Optional[_Iterable[int]] = ..., page_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class PhaseTiming(_message.Message):
    __slots__ = ("phase", "duration_ns", "start_ns")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    DURATION_NS_FIELD_NUMBER: _ClassVar[int]
    START_NS_FIELD_NUMBER: _ClassVar[int]
    phase: str
    duration_ns: int
    start_ns: int
    def __init__(self, phase: _Optional[str] = ..., duration_ns: _Optional[int] = ..., start_ns: _Optional[int] = ...) -> None: ...

class RowFailure(_message.Message):
    __slots__ = ("row", "reason")
    ROW_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    row: int
    reason: str
    def __init__(self, row: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...
