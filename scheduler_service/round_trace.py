"""What came of every row of every step, as JSON lines: what `dspark simulate` replays and calibration can learn from.

A line holds numbers alone: no text, no token ids, no request ids of clients. Requests are counted from 0.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from scheduler_service.request import Sequence
from scheduler_service.step_record import RowRound, StepObserver, StepRecord
from service_kit.errors import ConfigurationError


class RoundTrace(StepObserver):
    """Appends a line for every step to a file; written out at once, so that a crash loses nothing."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigurationError if the file cannot be written."""
        try:
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(
                f"trace_rounds: {error}: set DSPARK_SCHEDULER_TRACE_ROUNDS to a file that can be written",
                field="trace_rounds",
            ) from error
        self._numbers: WeakKeyDictionary[Sequence, int] = WeakKeyDictionary()
        self._num_requests = 0

    def observe(self, record: StepRecord) -> None:
        """See `StepObserver`."""
        work = record.work
        line = {
            "step_id": record.step_id,
            "num_rows": work.num_rows,
            "num_tokens": work.num_tokens,
            "num_context": work.num_context,
            "num_drafted": work.num_drafted,
            "block_len": work.block_len,
            "num_prefill": record.num_prefill,
            "step_ns": record.step_ns,
            "draft_ns": record.draft_ns,
            "rounds": [self._round(each) for each in record.rounds],
        }
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        self._file.flush()

    def _round(self, row: RowRound) -> dict[str, Any]:
        number = self._numbers.get(row.sequence)
        if number is None:
            number = self._numbers[row.sequence] = self._num_requests
            self._num_requests += 1
        return {
            "request": number,
            "regime": row.sequence.sampling.regime.name.lower(),
            "position": row.position,
            # JSON knows no NaN: a confidence that is none is null.
            "confidences": [round(c, 6) if math.isfinite(c) else None for c in row.confidences.tolist()],
            "verify_len": row.verify_len,
            "commit_len": row.commit_len,
            "num_accepted": row.num_accepted,
            "num_committed": len(row.committed_ids),
            "is_audit": row.is_audit,
        }

    def close(self) -> None:
        """See `StepObserver`."""
        self._file.close()
