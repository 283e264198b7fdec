"""Structured output at the scheduler's door: refusals name the field, and a client that leaves is forgotten."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import grpc
import pytest
from contract.test_scheduler_service import _request, _served, _wait_for
from dspark.v1 import scheduler_pb2
from fakes.rig import running
from tiny_target import tiny_tokenizer_file

from scheduler_service.grammar.compiler import GrammarCompiler
from service_kit.rpc import field_of

FORM = scheduler_pb2.StructuredOutput(regex="a+")


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/scheduler.sock"


def refusal(stub: Any, form: scheduler_pb2.StructuredOutput) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(_request("a", [1, 2], max_tokens=3, structured_output=form), timeout=20))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field_of(caught.value.trailing_metadata()) == "structured_output"
    return str(caught.value.details())


def test_without_a_tokenizer_it_is_refused_and_the_model_info_says_so(address: str) -> None:
    with running("static") as rig, _served(address, rig) as stub:
        reason = stub.GetModelInfo(scheduler_pb2.GetModelInfoRequest(), timeout=5).structured_output_off_reason
        assert "DSPARK_SCHEDULER_TOKENIZER" in reason
        assert reason in refusal(stub, FORM)
        assert len(list(stub.Generate(_request("a", [1, 2], max_tokens=3), timeout=10))) > 1


def test_refusals_name_the_field(address: str, tmp_path: Path) -> None:
    tiny_tokenizer_file(tmp_path)
    with running("static", tokenizer=tmp_path) as rig, _served(address, rig) as stub:
        assert not stub.GetModelInfo(scheduler_pb2.GetModelInfoRequest(), timeout=5).structured_output_off_reason
        assert "json_schema, regex and lark" in refusal(stub, scheduler_pb2.StructuredOutput())
        assert "not JSON" in refusal(stub, scheduler_pb2.StructuredOutput(json_schema="{"))
        # The toy target's head has fewer rows than this tokenizer has tokens.
        assert "tokenizer.json cannot be used" in refusal(stub, FORM)


def test_a_client_that_leaves_while_its_form_is_compiled_is_forgotten(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_tokenizer_file(tmp_path)
    gate, entered = threading.Event(), threading.Event()

    def compile_slowly(self: GrammarCompiler, form: Any) -> Any:
        entered.set()
        gate.wait()
        raise AssertionError("nobody waits for this")

    monkeypatch.setattr(GrammarCompiler, "_compile", compile_slowly)
    with running("static", tokenizer=tmp_path) as rig, _served(address, rig) as stub:
        submitted: list[str] = []
        submit = rig.scheduler.submit
        monkeypatch.setattr(
            rig.scheduler, "submit", lambda spec, *rest: submitted.append(spec.request_id) or submit(spec, *rest)
        )
        calls = [stub.Generate(_request(name, [1, 2], structured_output=FORM)) for name in ("first", "second")]
        assert entered.wait(10)
        for call in calls:
            call.cancel()
        compiler = rig.scheduler._structure.compiler  # type: ignore[union-attr]
        _wait_for(lambda: compiler._num_pending <= 1)  # the second one, which waited, has gone
        gate.set()
        _wait_for(lambda: compiler._num_pending == 0)
        assert len(list(stub.Generate(_request("free", [1, 2], max_tokens=3), timeout=10))) > 1
        assert submitted == ["free"]
