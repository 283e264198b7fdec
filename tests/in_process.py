"""Both executors of real models in this process, and schedulers over them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import drafter_service.server
import verifier_service.server
from drafter_service.settings import DrafterSettings
from scheduler_service.service import Scheduler
from scheduler_service.settings import SchedulerSettings
from scheduler_service.startup import build_scheduler
from scheduler_service.transport import InProcessTransport
from service_kit.engine_thread import EngineThread
from verifier_service.settings import VerifierSettings

GOLDEN = Path(__file__).parent / "golden"
GOLDEN_TARGET, GOLDEN_DRAFTERS = GOLDEN / "target", (GOLDEN / "draft_vanilla", GOLDEN / "draft_rnn")


class Executors:
    """A target and its drafters, on one thread."""

    def __init__(
        self, target: Path = GOLDEN_TARGET, drafters: Sequence[Path] = GOLDEN_DRAFTERS[:1], **both: Any
    ) -> None:
        """`both`: settings of verifier and drafters. Float32 unless told otherwise: random weights have near ties."""
        self.thread = EngineThread("test-engine")
        common = {"weight_format": "float32", "threads": 1, **both}
        self.verifier = verifier_service.server.load_servicer(
            VerifierSettings(model=str(target), **common), self.thread
        )
        self.drafters = [
            drafter_service.server.load_servicer(
                DrafterSettings(model=str(drafter), target=str(target), **common), self.thread
            )
            for drafter in drafters
        ]

    @property
    def page_bytes(self) -> int:
        """Of a page in both caches."""
        infos = self.verifier.GetInfo(None, None), self.drafters[0].GetInfo(None, None)
        return sum(int(info.page_bytes) for info in infos)

    @contextmanager
    def scheduler(self, mode: str, drafter: int = 0, **settings: Any) -> Iterator[Scheduler]:
        """Drafts every row unless told otherwise; measures no prefill. Checked for leaks and stopped at the end."""
        values = {"max_num_seqs": 4, "max_model_len": 80, "max_batch_tokens": 24, "guard": False, **settings}
        transport = None if mode == "off" else InProcessTransport(self.drafters[drafter])
        built = SchedulerSettings(verify_mode=mode, max_prefill_decode_steps=0, **values)
        scheduler = build_scheduler(built, InProcessTransport(self.verifier), transport)
        try:
            yield scheduler
            scheduler.check_integrity()
        finally:
            scheduler.stop()

    def close(self) -> None:
        """Ends the sessions and the thread."""
        for servicer in (self.verifier, *self.drafters):
            servicer.close()
        self.thread.stop()
