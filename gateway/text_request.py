"""The gRPC text service's request as the REST API's: one set of checks and limits for both."""

from __future__ import annotations

from typing import Any

from dspark.v1 import gateway_pb2, scheduler_pb2
from google.protobuf.json_format import MessageToDict

from gateway.conversions import sampling_from_pb
from gateway.schemas import ChatRequest, CompletionRequest, parse_request
from gateway.settings import GatewaySettings
from service_kit.errors import InvalidRequestError


def parse_text_request(
    request: gateway_pb2.GenerateTextRequest, settings: GatewaySettings
) -> ChatRequest | CompletionRequest:
    """The request, validated. Raises InvalidRequestError naming the field at fault."""
    prompts = [name for name in ("messages", "prompt", "prompt_token_ids") if getattr(request, name)]
    if len(prompts) != 1:
        raise InvalidRequestError("give messages, prompt or prompt_token_ids: exactly one of them", field="prompt")
    fields = _sampling_fields(request)
    for name in ("max_tokens", "truncate_prompt_tokens"):
        if request.HasField(name):
            fields[name] = getattr(request, name)
    if request.model:
        fields["model"] = request.model
    if request.HasField("speculation"):
        fields["speculation"] = {field.name: value for field, value in request.speculation.ListFields()}
    if request.report_steps:
        fields["dspark"] = {"steps": True}
    if request.HasField("structured_output"):
        fields["structured_outputs"] = _structured_outputs(request.structured_output)
    num_logprobs = request.num_logprobs if request.HasField("num_logprobs") else None
    if request.messages:
        fields |= _chat_fields(request)
        if num_logprobs is not None:
            fields |= {"logprobs": True, "top_logprobs": num_logprobs}
        return parse_request(ChatRequest, fields, settings)
    for field, _ in request.ListFields():
        if field.name in ("reasoning_effort", "continue_final_message", "chat_template_kwargs"):
            raise InvalidRequestError(f"{field.name} needs messages", field=field.name)
    fields |= {"prompt": request.prompt or [list(request.prompt_token_ids)], "logprobs": num_logprobs}
    return parse_request(CompletionRequest, fields, settings)


def _sampling_fields(request: gateway_pb2.GenerateTextRequest) -> dict[str, Any]:
    sampling = sampling_from_pb(request.sampling)
    if sampling.bad_words:
        raise InvalidRequestError(
            "sampling.bad_words holds tokens: use bad_words, which holds words, or SchedulerService",
            field="sampling.bad_words",
        )
    fields: dict[str, Any] = {name: value for name, value in vars(sampling).items() if value is not None}
    return fields | {
        "logit_bias": dict(sampling.logit_bias),
        "bad_words": list(request.bad_words),
        "stop": list(request.stop),
        "stop_token_ids": list(request.stop_token_ids),
        "ignore_eos": request.ignore_eos,
        "include_stop_str_in_output": request.include_stop,
        "skip_special_tokens": not request.show_special_tokens,
    }


def _chat_fields(request: gateway_pb2.GenerateTextRequest) -> dict[str, Any]:
    variables = MessageToDict(request.chat_template_kwargs) if request.HasField("chat_template_kwargs") else None
    return {
        "messages": [
            {"role": turn.role, "content": turn.content, "name": turn.name or None} for turn in request.messages
        ],
        "reasoning_effort": request.reasoning_effort or None,
        "chat_template_kwargs": variables,
        "continue_final_message": request.continue_final_message,
    }


def _structured_outputs(form: scheduler_pb2.StructuredOutput) -> dict[str, str]:
    """The REST API's field for it."""
    kind = form.WhichOneof("form")
    if kind is None:
        raise InvalidRequestError("structured_output: give json_schema, regex or lark", field="structured_output")
    return {{"json_schema": "json", "regex": "regex", "lark": "grammar"}[kind]: getattr(form, kind)}
