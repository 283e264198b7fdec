"""A tiny Qwen3 target that a whole server can run: the golden weights with a tokenizer and a chat template."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

GOLDEN = Path(__file__).parent / "golden"
TARGET, DRAFTER = GOLDEN / "target", GOLDEN / "draft_vanilla"
NUM_TOKENS = 512
END_OF_TURN = NUM_TOKENS - 1
"""Id of <|end|>. The untrained weights may pick it at any time; a test that counts tokens sets ignore_eos."""
_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def tiny_tokenizer_file(directory: Path) -> Path:
    """Writes tokenizer.json: bytes without merges; ids past the bytes are words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"w{i}" for i in range(len(alphabet), END_OF_TURN)]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate([*alphabet, *words])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    assert tokenizer.token_to_id("<|end|>") == END_OF_TURN
    file = directory / "tokenizer.json"
    tokenizer.save(str(file))
    return file


def clone_with_tokenizer(target: Path, directory: Path) -> None:
    """Copies checkpoint `target` and gives it the tiny tokenizer."""
    for file in target.iterdir():
        shutil.copy(file, directory)
    add_tokenizer(directory)


def add_tokenizer(directory: Path) -> None:
    """Gives a checkpoint of NUM_TOKENS tokens the tiny tokenizer and a chat template."""
    tiny_tokenizer_file(directory)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "chat_template": _TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
