"""The peers: what each is, what it needs and how it is started."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from bench.peers.install import NODE_LLAMA_CPP, is_installed, python_of
from bench.peers.worker import Worker
from service_kit.errors import ConfigurationError

_HERE = Path(__file__).parent
_START_S = 600.0
"""vLLM compiles the model at its first start."""
_ANSWER_S = 600.0


@dataclass(frozen=True)
class PeerSpec:
    """One peer."""

    name: str
    engine: str
    """A name of engines.py, or "node" for llama.mjs."""
    environment: str | None
    """Its folder of installed things; None: the interpreter that runs this, since the project needs the package too."""
    dtype: str = ""
    is_lookup: bool = False
    """Prompt-lookup speculation."""
    max_concurrency: int | None = None
    """Most prompts that it can answer together; None: any number."""
    note: str = ""

    @property
    def needs_gguf(self) -> bool:
        """Whether it reads the GGUF file, not the checkpoint directory."""
        return self.engine in ("node", "xllamacpp")


_BATCHED = "batch padded on the left"
_NODE = "node-llama-cpp, prebuilt for this CPU"
PEERS: dict[str, PeerSpec] = {
    spec.name: spec
    for spec in (
        PeerSpec("transformers", "transformers", None, "float32", note=f"generate, {_BATCHED}"),
        PeerSpec("transformers-bf16", "transformers", None, "bfloat16", note=f"generate, {_BATCHED}"),
        PeerSpec(
            "transformers-lookup",
            "transformers",
            None,
            "float32",
            True,
            1,
            "generate with prompt lookup, one prompt at a time",
        ),
        PeerSpec("vllm-bf16", "vllm", "vllm", "bfloat16", note="vLLM's CPU build"),
        PeerSpec("vllm-fp16", "vllm", "vllm", "float16", note="vLLM's CPU build"),
        PeerSpec("vllm-fp32", "vllm", "vllm", "float32", note="vLLM's CPU build"),
        PeerSpec("llama.cpp", "node", "node", note=_NODE),
        PeerSpec("llama.cpp-lookup", "node", "node", is_lookup=True, note=f"{_NODE}; its input lookup"),
        PeerSpec("llama.cpp-server", "xllamacpp", "xllamacpp", note="llama.cpp's HTTP server, prebuilt for AVX2"),
        PeerSpec(
            "llama.cpp-server-lookup",
            "xllamacpp",
            "xllamacpp",
            is_lookup=True,
            note="llama.cpp's HTTP server, prebuilt for AVX2; its ngram-simple drafts",
        ),
    )
}


@dataclass(frozen=True)
class WorkerOptions:
    """What every peer of a run is told."""

    model_dir: Path
    gguf: Path | None
    threads: int
    concurrency: int
    """Most prompts together."""
    context: int
    """Tokens of one prompt and its answer."""
    root: Path
    """Environments and logs of peers."""


def choose(names: str | None, root: Path, *, has_gguf: bool, will_install: bool) -> list[PeerSpec]:
    """Peers by comma-separated name; None: all that are installed and can read the model.

    Raises ConfigurationError naming the unknown or missing one.
    """
    if names is None:
        return [spec for spec in PEERS.values() if (has_gguf or not spec.needs_gguf) and _is_there(spec, root)]
    chosen = []
    for name in dict.fromkeys(part.strip() for part in names.split(",")):
        spec = PEERS.get(name)
        if spec is None:
            raise ConfigurationError(f"no peer {name!r}: there are {', '.join(PEERS)}", field="--peers")
        if spec.needs_gguf and not has_gguf:
            raise ConfigurationError(f"{name} needs a GGUF file in the model's directory", field="--peers")
        if not will_install and not _is_there(spec, root):
            raise ConfigurationError(f"{name} is not installed: add --install", field="--peers")
        chosen.append(spec)
    return chosen


def environments_of(specs: Iterable[PeerSpec]) -> list[str]:
    """What has to be installed for these peers and the chart."""
    return [*dict.fromkeys(spec.environment for spec in specs if spec.environment), "plot"]


def command_of(spec: PeerSpec, options: WorkerOptions) -> list[str]:
    """The command that runs a peer."""
    fields = {
        "model": str(options.gguf if spec.needs_gguf else options.model_dir),
        "dtype": spec.dtype,
        "threads": options.threads,
        "concurrency": min(options.concurrency, spec.max_concurrency or options.concurrency),
        "context": options.context,
        "lookup": spec.is_lookup,
    }
    directory = options.root / (spec.environment or "")
    if spec.engine == "node":
        module = directory / "node_modules" / "node-llama-cpp" / "dist" / "index.js"
        extra = {"module": str(module), "version": NODE_LLAMA_CPP}
        return ["node", str(_HERE / "llama.mjs"), json.dumps({**fields, **extra})]
    python = str(python_of(directory)) if spec.environment else sys.executable
    command = [python, str(_HERE / "engines.py"), spec.engine, json.dumps(fields)]
    return [*_vllm_variables(directory, options.threads), *command] if spec.engine == "vllm" else command


def start(spec: PeerSpec, options: WorkerOptions) -> Worker:
    """Starts a peer and waits for it. Raises PeerError."""
    logs = options.root / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    log_path = logs / f"{spec.name}.log"
    return Worker(spec.name, command_of(spec, options), log_path, start_s=_START_S, answer_s=_ANSWER_S)


def _vllm_variables(directory: Path, threads: int) -> list[str]:
    """In one process, its threads on the first cores, Intel's OpenMP first as vLLM's CPU guide asks; offline."""
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    openmp = directory / "lib" / "libiomp5.so"
    if openmp.exists():
        variables["LD_PRELOAD"] = str(openmp)
    return ["env", *(f"{name}={value}" for name, value in variables.items())]


def _is_there(spec: PeerSpec, root: Path) -> bool:
    return spec.environment is None or is_installed(root, spec.environment)
