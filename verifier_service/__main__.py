"""The verifier process: `python -m verifier_service`, configured by DSPARK_VERIFIER_* and DSPARK_*."""

from __future__ import annotations

import sys

from dspark.v1 import verifier_pb2_grpc

from service_kit.executor import Executor
from verifier_service.server import SERVICE_NAME, load_servicer
from verifier_service.settings import VerifierSettings

EXECUTOR = Executor(
    name="verifier",
    service_name=SERVICE_NAME,
    settings_class=VerifierSettings,
    load=load_servicer,
    register=verifier_pb2_grpc.add_VerifierServiceServicer_to_server,
    step_call=lambda servicer: servicer.step_bytes,
)

if __name__ == "__main__":
    sys.exit(EXECUTOR.main())
