"""The drafter process: `python -m drafter_service`, configured by DSPARK_DRAFTER_* and DSPARK_*."""

from __future__ import annotations

import sys

from dspark.v1 import drafter_pb2_grpc

from drafter_service.server import SERVICE_NAME, load_servicer
from drafter_service.settings import DrafterSettings
from service_kit.executor import Executor

EXECUTOR = Executor(
    name="drafter",
    service_name=SERVICE_NAME,
    settings_class=DrafterSettings,
    load=load_servicer,
    register=drafter_pb2_grpc.add_DrafterServiceServicer_to_server,
    step_call=lambda servicer: servicer.draft_bytes,
)

if __name__ == "__main__":
    sys.exit(EXECUTOR.main())
