"""See `gpu_process`."""

import sys

from fakes.gpu_process import run

from drafter_service.__main__ import EXECUTOR

if __name__ == "__main__":
    sys.exit(run(EXECUTOR, "drafter_service"))
