"""Requests of the API: strict types, limits, and what is not supported yet."""

from gateway.schemas.chat import ChatMessage, ChatRequest
from gateway.schemas.completions import CompletionRequest
from gateway.schemas.generation import Extension, GenerationRequest, Speculation, StreamOptions
from gateway.schemas.parsing import NEUTRAL_VALUES, parse_request, unknown_parameters

__all__ = [
    "NEUTRAL_VALUES",
    "ChatMessage",
    "ChatRequest",
    "CompletionRequest",
    "Extension",
    "GenerationRequest",
    "Speculation",
    "StreamOptions",
    "parse_request",
    "unknown_parameters",
]
