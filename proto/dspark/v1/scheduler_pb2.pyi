from dspark.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason
FINISH_REASON_ERROR: FinishReason

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "seed", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "bad_words", "min_tokens")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    bad_words: _containers.RepeatedCompositeFieldContainer[_types_pb2.TokenSequence]
    min_tokens: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., bad_words: _Optional[_Iterable[_Union[_types_pb2.TokenSequence, _Mapping]]] = ..., min_tokens: _Optional[int] = ...) -> None: ...

class SpeculationParams(_message.Message):
    __slots__ = ("enabled", "max_draft_tokens", "max_time_per_token_ms", "priority")
    ENABLED_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TIME_PER_TOKEN_MS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    enabled: bool
    max_draft_tokens: int
    max_time_per_token_ms: float
    priority: float
    def __init__(self, enabled: _Optional[bool] = ..., max_draft_tokens: _Optional[int] = ..., max_time_per_token_ms: _Optional[float] = ..., priority: _Optional[float] = ...) -> None: ...

class StructuredOutput(_message.Message):
    __slots__ = ("json_schema", "regex", "lark")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    LARK_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    regex: str
    lark: str
    def __init__(self, json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., lark: _Optional[str] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "prompt_token_ids", "sampling", "max_tokens", "stop_token_ids", "ignore_eos", "num_choices", "isolation_key", "bypass_prefix_cache", "speculation", "num_logprobs", "num_prompt_logprobs", "report_steps", "structured_output")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    NUM_CHOICES_FIELD_NUMBER: _ClassVar[int]
    ISOLATION_KEY_FIELD_NUMBER: _ClassVar[int]
    BYPASS_PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    REPORT_STEPS_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: SamplingParams
    max_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    num_choices: int
    isolation_key: bytes
    bypass_prefix_cache: bool
    speculation: SpeculationParams
    num_logprobs: int
    num_prompt_logprobs: int
    report_steps: bool
    structured_output: StructuredOutput
    def __init__(self, request_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., max_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., num_choices: _Optional[int] = ..., isolation_key: _Optional[bytes] = ..., bypass_prefix_cache: _Optional[bool] = ..., speculation: _Optional[_Union[SpeculationParams, _Mapping]] = ..., num_logprobs: _Optional[int] = ..., num_prompt_logprobs: _Optional[int] = ..., report_steps: _Optional[bool] = ..., structured_output: _Optional[_Union[StructuredOutput, _Mapping]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("chunk", "summary")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    chunk: TokenChunk
    summary: GenerateSummary
    def __init__(self, chunk: _Optional[_Union[TokenChunk, _Mapping]] = ..., summary: _Optional[_Union[GenerateSummary, _Mapping]] = ...) -> None: ...

class TokenChunk(_message.Message):
    __slots__ = ("choice", "token_ids", "num_accepted", "num_verified", "finish_reason", "scores", "prompt_scores", "num_drafted", "confidences", "budget", "num_rows", "num_uncut_accepted")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    NUM_VERIFIED_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_SCORES_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTED_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCES_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_UNCUT_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    choice: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_accepted: int
    num_verified: int
    finish_reason: FinishReason
    scores: _containers.RepeatedCompositeFieldContainer[_types_pb2.TokenScore]
    prompt_scores: _containers.RepeatedCompositeFieldContainer[_types_pb2.TokenScore]
    num_drafted: int
    confidences: _containers.RepeatedScalarFieldContainer[float]
    budget: int
    num_rows: int
    num_uncut_accepted: int
    def __init__(self, choice: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_accepted: _Optional[int] = ..., num_verified: _Optional[int] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., scores: _Optional[_Iterable[_Union[_types_pb2.TokenScore, _Mapping]]] = ..., prompt_scores: _Optional[_Iterable[_Union[_types_pb2.TokenScore, _Mapping]]] = ..., num_drafted: _Optional[int] = ..., confidences: _Optional[_Iterable[float]] = ..., budget: _Optional[int] = ..., num_rows: _Optional[int] = ..., num_uncut_accepted: _Optional[int] = ...) -> None: ...

class ChoiceSummary(_message.Message):
    __slots__ = ("choice", "finish_reason", "num_tokens", "num_steps", "num_drafted", "num_verified", "num_accepted", "accepted_histogram", "num_drafted_steps", "num_uncut_accepted")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTED_FIELD_NUMBER: _ClassVar[int]
    NUM_VERIFIED_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_HISTOGRAM_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTED_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_UNCUT_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    choice: int
    finish_reason: FinishReason
    num_tokens: int
    num_steps: int
    num_drafted: int
    num_verified: int
    num_accepted: int
    accepted_histogram: _containers.RepeatedScalarFieldContainer[int]
    num_drafted_steps: int
    num_uncut_accepted: int
    def __init__(self, choice: _Optional[int] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., num_tokens: _Optional[int] = ..., num_steps: _Optional[int] = ..., num_drafted: _Optional[int] = ..., num_verified: _Optional[int] = ..., num_accepted: _Optional[int] = ..., accepted_histogram: _Optional[_Iterable[int]] = ..., num_drafted_steps: _Optional[int] = ..., num_uncut_accepted: _Optional[int] = ...) -> None: ...

class GenerateSummary(_message.Message):
    __slots__ = ("choices", "num_prompt_tokens", "error", "speculation_off_reason", "num_cached_tokens")
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_OFF_REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    choices: _containers.RepeatedCompositeFieldContainer[ChoiceSummary]
    num_prompt_tokens: int
    error: str
    speculation_off_reason: str
    num_cached_tokens: int
    def __init__(self, choices: _Optional[_Iterable[_Union[ChoiceSummary, _Mapping]]] = ..., num_prompt_tokens: _Optional[int] = ..., error: _Optional[str] = ..., speculation_off_reason: _Optional[str] = ..., num_cached_tokens: _Optional[int] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_id", "choice", "reason")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    choice: int
    reason: FinishReason
    def __init__(self, request_id: _Optional[str] = ..., choice: _Optional[int] = ..., reason: _Optional[_Union[FinishReason, str]] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("model", "drafter", "verify_mode", "max_model_len", "vocab_size", "max_num_seqs", "eos_token_ids", "block_size", "sampling_defaults", "speculation_off_reason", "inexact_reason", "calibration", "structured_output_off_reason")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    VERIFY_MODE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_OFF_REASON_FIELD_NUMBER: _ClassVar[int]
    INEXACT_REASON_FIELD_NUMBER: _ClassVar[int]
    CALIBRATION_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUT_OFF_REASON_FIELD_NUMBER: _ClassVar[int]
    model: str
    drafter: str
    verify_mode: str
    max_model_len: int
    vocab_size: int
    max_num_seqs: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    block_size: int
    sampling_defaults: SamplingParams
    speculation_off_reason: str
    inexact_reason: str
    calibration: str
    structured_output_off_reason: str
    def __init__(self, model: _Optional[str] = ..., drafter: _Optional[str] = ..., verify_mode: _Optional[str] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., block_size: _Optional[int] = ..., sampling_defaults: _Optional[_Union[SamplingParams, _Mapping]] = ..., speculation_off_reason: _Optional[str] = ..., inexact_reason: _Optional[str] = ..., calibration: _Optional[str] = ..., structured_output_off_reason: _Optional[str] = ...) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CalibrationError(_message.Message):
    __slots__ = ("regime", "position", "ece", "num_observed", "correction")
    REGIME_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    ECE_FIELD_NUMBER: _ClassVar[int]
    NUM_OBSERVED_FIELD_NUMBER: _ClassVar[int]
    CORRECTION_FIELD_NUMBER: _ClassVar[int]
    regime: _types_pb2.Regime
    position: int
    ece: float
    num_observed: int
    correction: float
    def __init__(self, regime: _Optional[_Union[_types_pb2.Regime, str]] = ..., position: _Optional[int] = ..., ece: _Optional[float] = ..., num_observed: _Optional[int] = ..., correction: _Optional[float] = ...) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("num_running", "num_waiting", "num_free_slots", "num_slots", "num_free_pages", "num_pages", "num_steps", "num_committed", "num_drafted", "num_verified", "num_accepted", "num_verify_rows", "step_ns", "draft_call_ns", "step_call_ns", "drafter_model_ns", "verifier_model_ns", "num_preemptions", "num_prefill_tokens", "verifier_accept_ns", "num_cached_pages", "num_prefix_cache_queries", "num_prefix_cache_hits", "num_uncut_accepted", "num_invalid_confidences", "num_drafted_steps", "predicted_gain_ns", "measured_gain_ns", "num_predictions", "num_capped_errors", "predicted_ns", "predicted_measured_ns", "prediction_error_ns", "num_audited_rounds", "num_audit_drafts", "calibration_errors", "block_accept_low", "block_accept_high", "num_blocks", "num_open_blocks", "num_targeted_choices", "num_on_target_choices", "num_targeted_tokens", "num_on_target_tokens", "num_decode_steps", "num_decode_committed", "decode_step_ns", "decode_draft_call_ns", "decode_step_call_ns", "num_drafted_rows", "num_chained_steps", "num_prompt_tokens")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTED_FIELD_NUMBER: _ClassVar[int]
    NUM_VERIFIED_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    NUM_VERIFY_ROWS_FIELD_NUMBER: _ClassVar[int]
    STEP_NS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_CALL_NS_FIELD_NUMBER: _ClassVar[int]
    STEP_CALL_NS_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_MODEL_NS_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_MODEL_NS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_ACCEPT_NS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_PAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_CACHE_QUERIES_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_CACHE_HITS_FIELD_NUMBER: _ClassVar[int]
    NUM_UNCUT_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    NUM_INVALID_CONFIDENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTED_STEPS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_GAIN_NS_FIELD_NUMBER: _ClassVar[int]
    MEASURED_GAIN_NS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREDICTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_CAPPED_ERRORS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_NS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_MEASURED_NS_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_ERROR_NS_FIELD_NUMBER: _ClassVar[int]
    NUM_AUDITED_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    NUM_AUDIT_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    CALIBRATION_ERRORS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_ACCEPT_LOW_FIELD_NUMBER: _ClassVar[int]
    BLOCK_ACCEPT_HIGH_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_OPEN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_TARGETED_CHOICES_FIELD_NUMBER: _ClassVar[int]
    NUM_ON_TARGET_CHOICES_FIELD_NUMBER: _ClassVar[int]
    NUM_TARGETED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ON_TARGET_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODE_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODE_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEP_NS_FIELD_NUMBER: _ClassVar[int]
    DECODE_DRAFT_CALL_NS_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEP_CALL_NS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTED_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_CHAINED_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    num_free_slots: int
    num_slots: int
    num_free_pages: int
    num_pages: int
    num_steps: int
    num_committed: int
    num_drafted: int
    num_verified: int
    num_accepted: int
    num_verify_rows: int
    step_ns: int
    draft_call_ns: int
    step_call_ns: int
    drafter_model_ns: int
    verifier_model_ns: int
    num_preemptions: int
    num_prefill_tokens: int
    verifier_accept_ns: int
    num_cached_pages: int
    num_prefix_cache_queries: int
    num_prefix_cache_hits: int
    num_uncut_accepted: int
    num_invalid_confidences: int
    num_drafted_steps: int
    predicted_gain_ns: int
    measured_gain_ns: int
    num_predictions: int
    num_capped_errors: int
    predicted_ns: int
    predicted_measured_ns: int
    prediction_error_ns: int
    num_audited_rounds: int
    num_audit_drafts: int
    calibration_errors: _containers.RepeatedCompositeFieldContainer[CalibrationError]
    block_accept_low: float
    block_accept_high: float
    num_blocks: int
    num_open_blocks: int
    num_targeted_choices: int
    num_on_target_choices: int
    num_targeted_tokens: int
    num_on_target_tokens: int
    num_decode_steps: int
    num_decode_committed: int
    decode_step_ns: int
    decode_draft_call_ns: int
    decode_step_call_ns: int
    num_drafted_rows: int
    num_chained_steps: int
    num_prompt_tokens: int
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_free_slots: _Optional[int] = ..., num_slots: _Optional[int] = ..., num_free_pages: _Optional[int] = ..., num_pages: _Optional[int] = ..., num_steps: _Optional[int] = ..., num_committed: _Optional[int] = ..., num_drafted: _Optional[int] = ..., num_verified: _Optional[int] = ..., num_accepted: _Optional[int] = ..., num_verify_rows: _Optional[int] = ..., step_ns: _Optional[int] = ..., draft_call_ns: _Optional[int] = ..., step_call_ns: _Optional[int] = ..., drafter_model_ns: _Optional[int] = ..., verifier_model_ns: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., num_prefill_tokens: _Optional[int] = ..., verifier_accept_ns: _Optional[int] = ..., num_cached_pages: _Optional[int] = ..., num_prefix_cache_queries: _Optional[int] = ..., num_prefix_cache_hits: _Optional[int] = ..., num_uncut_accepted: _Optional[int] = ..., num_invalid_confidences: _Optional[int] = ..., num_drafted_steps: _Optional[int] = ..., predicted_gain_ns: _Optional[int] = ..., measured_gain_ns: _Optional[int] = ..., num_predictions: _Optional[int] = ..., num_capped_errors: _Optional[int] = ..., predicted_ns: _Optional[int] = ..., predicted_measured_ns: _Optional[int] = ..., prediction_error_ns: _Optional[int] = ..., num_audited_rounds: _Optional[int] = ..., num_audit_drafts: _Optional[int] = ..., calibration_errors: _Optional[_Iterable[_Union[CalibrationError, _Mapping]]] = ..., block_accept_low: _Optional[float] = ..., block_accept_high: _Optional[float] = ..., num_blocks: _Optional[int] = ..., num_open_blocks: _Optional[int] = ..., num_targeted_choices: _Optional[int] = ..., num_on_target_choices: _Optional[int] = ..., num_targeted_tokens: _Optional[int] = ..., num_on_target_tokens: _Optional[int] = ..., num_decode_steps: _Optional[int] = ..., num_decode_committed: _Optional[int] = ..., decode_step_ns: _Optional[int] = ..., decode_draft_call_ns: _Optional[int] = ..., decode_step_call_ns: _Optional[int] = ..., num_drafted_rows: _Optional[int] = ..., num_chained_steps: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ...) -> None: ...
