from dspark.v1 import scheduler_pb2 as _scheduler_pb2
from dspark.v1 import types_pb2 as _types_pb2
from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "name")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    name: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class GenerateTextRequest(_message.Message):
    __slots__ = ("messages", "prompt", "sampling", "max_tokens", "stop", "model", "speculation", "report_steps", "structured_output", "bad_words", "stop_token_ids", "ignore_eos", "include_stop", "show_special_tokens", "truncate_prompt_tokens", "prompt_token_ids", "reasoning_effort", "chat_template_kwargs", "continue_final_message", "num_logprobs", "return_token_ids")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    REPORT_STEPS_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_FIELD_NUMBER: _ClassVar[int]
    SHOW_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    REASONING_EFFORT_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_KWARGS_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_FINAL_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RETURN_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    prompt: str
    sampling: _scheduler_pb2.SamplingParams
    max_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    model: str
    speculation: _scheduler_pb2.SpeculationParams
    report_steps: bool
    structured_output: _scheduler_pb2.StructuredOutput
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    include_stop: bool
    show_special_tokens: bool
    truncate_prompt_tokens: int
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    reasoning_effort: str
    chat_template_kwargs: _struct_pb2.Struct
    continue_final_message: bool
    num_logprobs: int
    return_token_ids: bool
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., prompt: _Optional[str] = ..., sampling: _Optional[_Union[_scheduler_pb2.SamplingParams, _Mapping]] = ..., max_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., model: _Optional[str] = ..., speculation: _Optional[_Union[_scheduler_pb2.SpeculationParams, _Mapping]] = ..., report_steps: _Optional[bool] = ..., structured_output: _Optional[_Union[_scheduler_pb2.StructuredOutput, _Mapping]] = ..., bad_words: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., include_stop: _Optional[bool] = ..., show_special_tokens: _Optional[bool] = ..., truncate_prompt_tokens: _Optional[int] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., reasoning_effort: _Optional[str] = ..., chat_template_kwargs: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., continue_final_message: _Optional[bool] = ..., num_logprobs: _Optional[int] = ..., return_token_ids: _Optional[bool] = ...) -> None: ...

class GenerateTextResponse(_message.Message):
    __slots__ = ("chunk", "summary")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    chunk: TextChunk
    summary: TextSummary
    def __init__(self, chunk: _Optional[_Union[TextChunk, _Mapping]] = ..., summary: _Optional[_Union[TextSummary, _Mapping]] = ...) -> None: ...

class TextPiece(_message.Message):
    __slots__ = ("text", "is_accepted_draft")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    IS_ACCEPTED_DRAFT_FIELD_NUMBER: _ClassVar[int]
    text: str
    is_accepted_draft: bool
    def __init__(self, text: _Optional[str] = ..., is_accepted_draft: _Optional[bool] = ...) -> None: ...

class StepReport(_message.Message):
    __slots__ = ("num_drafted", "num_verified", "num_accepted", "confidences", "budget", "num_rows", "num_uncut_accepted")
    NUM_DRAFTED_FIELD_NUMBER: _ClassVar[int]
    NUM_VERIFIED_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCES_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_UNCUT_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    num_drafted: int
    num_verified: int
    num_accepted: int
    confidences: _containers.RepeatedScalarFieldContainer[float]
    budget: int
    num_rows: int
    num_uncut_accepted: int
    def __init__(self, num_drafted: _Optional[int] = ..., num_verified: _Optional[int] = ..., num_accepted: _Optional[int] = ..., confidences: _Optional[_Iterable[float]] = ..., budget: _Optional[int] = ..., num_rows: _Optional[int] = ..., num_uncut_accepted: _Optional[int] = ...) -> None: ...

class TextChunk(_message.Message):
    __slots__ = ("pieces", "step", "token_ids", "scores")
    PIECES_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    pieces: _containers.RepeatedCompositeFieldContainer[TextPiece]
    step: StepReport
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    scores: _containers.RepeatedCompositeFieldContainer[_types_pb2.TokenScore]
    def __init__(self, pieces: _Optional[_Iterable[_Union[TextPiece, _Mapping]]] = ..., step: _Optional[_Union[StepReport, _Mapping]] = ..., token_ids: _Optional[_Iterable[int]] = ..., scores: _Optional[_Iterable[_Union[_types_pb2.TokenScore, _Mapping]]] = ...) -> None: ...

class TextSummary(_message.Message):
    __slots__ = ("finish_reason", "num_prompt_tokens", "num_completion_tokens", "speculation", "num_cached_tokens", "speculation_off_reason")
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_OFF_REASON_FIELD_NUMBER: _ClassVar[int]
    finish_reason: _scheduler_pb2.FinishReason
    num_prompt_tokens: int
    num_completion_tokens: int
    speculation: _scheduler_pb2.ChoiceSummary
    num_cached_tokens: int
    speculation_off_reason: str
    def __init__(self, finish_reason: _Optional[_Union[_scheduler_pb2.FinishReason, str]] = ..., num_prompt_tokens: _Optional[int] = ..., num_completion_tokens: _Optional[int] = ..., speculation: _Optional[_Union[_scheduler_pb2.ChoiceSummary, _Mapping]] = ..., num_cached_tokens: _Optional[int] = ..., speculation_off_reason: _Optional[str] = ...) -> None: ...
