"""A short measurement on real servers: speed, acceptance, and whether drafts change the text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dspark.v1 import scheduler_pb2, scheduler_pb2_grpc, verifier_pb2, verifier_pb2_grpc

from launcher.client import Answer, Client, new_answer
from launcher.models import ModelPair
from launcher.preflight import free_port_pair
from launcher.services import ServeOptions
from launcher.settings import LauncherSettings
from launcher.stack import running_server
from launcher.supervisor import stop_on_signals
from service_kit.errors import ConfigurationError
from service_kit.rpc import open_channel, socket_address
from service_kit.settings import CommonSettings

PROMPTS = (
    "List three uses of a paper clip.",
    "What is 17 + 25? Explain step by step.",
    "Write a Python function that reverses a string.",
    "Why is the sky blue?",
)
"""Built-in prompts: a list, arithmetic, code, prose."""

_MAX_TOKENS = 48
_MAX_INFO_BYTES, _INFO_TIMEOUT_S = 2**20, 5.0


@dataclass(frozen=True)
class SelfTest:
    """Outcome. Without a drafter only the plain speed is known."""

    num_prompts: int
    num_equal: int
    off_tokens_per_second: float
    static_tokens_per_second: float
    accepted_length: float | None
    weight_format: str
    weight_format_reason: str
    inexact_reason: str
    """Why a row's result may depend on the rows beside it; empty when it does not."""
    calibration: str
    """How the drafter's confidences are calibrated, in words; empty without a drafter."""


def run_self_test(pair: ModelPair, common: CommonSettings, settings: LauncherSettings) -> SelfTest:
    """Greedy answers with mode off, then static. Raises ServiceDiedError, ServerError or ConfigurationError."""
    plain, info, _ = _answers(pair, "off", common, settings)
    drafted, _, served = _answers(pair, "static", common, settings) if pair.drafter else ([], None, None)
    steps = sum((answer.speculation or {}).get("num_spec_steps", 0) for answer in drafted)
    accepted = sum((answer.speculation or {}).get("num_accepted_draft_tokens", 0) for answer in drafted)
    return SelfTest(
        num_prompts=len(PROMPTS),
        num_equal=sum(one.token_ids == other.token_ids for one, other in zip(plain, drafted, strict=False)),
        off_tokens_per_second=_speed(plain),
        static_tokens_per_second=_speed(drafted) if drafted else 0.0,
        accepted_length=1 + accepted / steps if steps else None,
        weight_format=info.weight_format,
        weight_format_reason=info.weight_format_reason,
        inexact_reason=info.inexact_reason,
        calibration=served.calibration if served is not None else "",
    )


def _answers(
    pair: ModelPair, mode: str, common: CommonSettings, settings: LauncherSettings
) -> tuple[list[Answer], Any, Any]:
    """Answers, and what verifier and scheduler say of themselves."""
    options = ServeOptions(port=free_port_pair(), verify_mode=mode, max_num_seqs=1)
    parameters: dict[str, Any] = {"temperature": 0.0, "max_tokens": _MAX_TOKENS, "return_token_ids": True}
    with (
        stop_on_signals() as stop,
        running_server(options, pair, common=common, settings=settings, stop=stop) as server,
    ):
        if server is None:
            raise ConfigurationError("interrupted")
        client = Client(server.url)
        answers = []
        for prompt in (PROMPTS[0], *PROMPTS):  # the first one warms up
            answer = new_answer()
            for _ in client.chat([{"role": "user", "content": prompt}], answer, **parameters):
                pass
            answers.append(answer)
        client.close()
        address = socket_address(server.run_dir, "verifier")
        with open_channel(address, max_message_bytes=_MAX_INFO_BYTES) as channel:
            stub: Any = verifier_pb2_grpc.VerifierServiceStub(channel)  # type: ignore[no-untyped-call]
            info = stub.GetInfo(verifier_pb2.VerifierServiceGetInfoRequest(), timeout=_INFO_TIMEOUT_S)
        with open_channel(socket_address(server.run_dir, "scheduler"), max_message_bytes=_MAX_INFO_BYTES) as channel:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)  # type: ignore[no-untyped-call]
            served = stub.GetModelInfo(scheduler_pb2.GetModelInfoRequest(), timeout=_INFO_TIMEOUT_S)
        return answers[1:], info, served


def _speed(answers: list[Answer]) -> float:
    """Tokens per second after the first token of each answer."""
    seconds = sum((answer.last_token or 0.0) - (answer.first_token or 0.0) for answer in answers)
    return sum(answer.num_tokens - 1 for answer in answers) / max(seconds, 1e-9)
