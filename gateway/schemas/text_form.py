"""Fields that say which part of prompt and answer is used and shown."""

from __future__ import annotations

from pydantic import BaseModel, Field, ValidationInfo, field_validator

from gateway.prompts import ChatEnd
from gateway.schemas.controls import Integer


class TextFields(BaseModel):
    """What becomes of the prompt's tokens and of the answer's text."""

    truncate_prompt_tokens: Integer | None = Field(None, ge=-1, le=2**31 - 1)
    """Keep only so many of the prompt's last tokens; -1 as many as fit beside the answer."""
    prompt_logprobs: Integer | None = Field(None, ge=0, le=20)
    """Score the prompt's tokens, with so many of the likeliest."""
    include_stop_str_in_output: bool | None = None
    """Show the stop string or the stop token that ended the answer."""
    skip_special_tokens: bool | None = None
    """False: special tokens of the answer are shown by name."""

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _check_truncation(cls, value: int | None) -> int | None:
        if value == 0:
            raise ValueError("0 leaves nothing of the prompt: send how many tokens to keep, or -1 for all that fit")
        return value

    @property
    def shows_special_tokens(self) -> bool:
        """Whether special tokens of the answer are shown by name."""
        return self.skip_special_tokens is False


class TemplateEnd(BaseModel):
    """How the rendered chat ends."""

    add_generation_prompt: bool | None = None
    """False: the prompt ends with the last turn, before what the template puts in front of an answer."""
    continue_final_message: bool | None = None
    """True: the prompt ends within the last turn, the assistant's, which the answer continues."""

    @property
    def chat_end(self) -> ChatEnd:
        """Where the rendered chat ends."""
        if self.continue_final_message:
            return ChatEnd.CONTINUE
        return ChatEnd.TURN if self.add_generation_prompt is False else ChatEnd.ANSWER

    @field_validator("continue_final_message")
    @classmethod
    def _check_one_end(cls, value: bool | None, info: ValidationInfo) -> bool | None:
        if value and info.data.get("add_generation_prompt"):
            raise ValueError("needs add_generation_prompt to be false or left out")
        return value
