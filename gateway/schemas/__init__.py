"""Requests of the API: strict types, limits, and what is not supported yet."""

from gateway.schemas.chat import ChatMessage, ChatRequest
from gateway.schemas.completions import CompletionRequest
from gateway.schemas.generation import Extension, GenerationRequest, StreamOptions
from gateway.schemas.parsing import NEUTRAL_VALUES, parse_request, unknown_parameters
from gateway.schemas.responses import ResponsesRequest
from gateway.schemas.sampling import Speculation
from gateway.schemas.tokenize import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest

__all__ = [
    "NEUTRAL_VALUES",
    "ChatMessage",
    "ChatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "Extension",
    "GenerationRequest",
    "ResponsesRequest",
    "Speculation",
    "StreamOptions",
    "TokenizeChatRequest",
    "TokenizeTextRequest",
    "parse_request",
    "unknown_parameters",
]
