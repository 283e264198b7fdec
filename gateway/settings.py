"""Settings of the gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from service_kit.errors import ConfigurationError


class GatewaySettings(BaseSettings):
    """Settings from DSPARK_GATEWAY_*. Lists are comma-separated."""

    model_config = SettingsConfigDict(env_prefix="DSPARK_GATEWAY_", frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    """Address the REST API listens on."""
    port: int = Field(8000, ge=0, le=65535)
    """Port of the REST API; 0 takes a free one."""
    grpc_host: str = "127.0.0.1"
    """Address the text gRPC service listens on."""
    grpc_port: int = Field(0, ge=0, le=65535)
    """Port of the text gRPC service; 0 means `port` + 1."""
    model_dir: Path | None = None
    """Directory with the target's tokenizer and chat template. Required."""
    chat_template: Path | None = None
    """Chat template file to use in place of the model's own."""
    served_model_names: Annotated[tuple[str, ...], NoDecode] = ()
    """Names clients may ask for, the first one being the default; empty: the name of `model_dir`."""
    api_keys: SecretStr = SecretStr("")
    """API keys, comma-separated. Without keys every caller is let in."""
    api_keys_file: Path | None = None
    """File with one API key a line, besides `api_keys`."""
    allow_special_tokens: bool = False
    """Whether special tokens written out in a chat message act as such. A client could then forge turns."""
    page: bool = True
    """Whether the chat page is served at `/`. Its files are open; what it asks of the API needs a key as always."""
    metrics_open: bool = False
    """Whether `/metrics` needs no API key."""
    max_body_bytes: int = Field(4 * 2**20, ge=1024)
    """Largest request body, in bytes."""
    max_json_depth: int = Field(100, ge=8, le=250)
    """Most levels of nesting in a request body."""
    max_messages: int = Field(4096, ge=1)
    """Most messages of a chat."""
    max_prompts: int = Field(64, ge=1)
    """Most prompts of one completion request."""
    max_stop_strings: int = Field(16, ge=0)
    """Most stop strings of a request."""
    max_stop_length: int = Field(256, ge=1)
    """Longest stop string, in characters."""
    max_stop_token_ids: int = Field(128, ge=0)
    """Most stop token ids of a request."""
    max_logit_bias: int = Field(1024, ge=0)
    """Most tokens that a request may bias."""
    max_bad_words: int = Field(128, ge=0)
    """Most bad words of a request; each as long as a stop string at most."""
    max_tools: int = Field(128, ge=0)
    """Most tools of a request."""
    max_form_bytes: int = Field(65536, ge=256)
    """Largest schema, regular expression or grammar of a request, in bytes; of tools, the grammar of all of them."""
    keepalive_s: float = Field(10.0, gt=0)
    """Seconds of silence on a stream after which a comment line is sent."""
    admission_timeout_s: float = Field(30.0, gt=0)
    """Seconds the scheduler may take to admit or refuse a request."""
    first_token_timeout_s: float = Field(600.0, gt=0)
    """Seconds from admission to the first token, waiting and prefill included; then the request ends with 504."""
    generation_timeout_s: float = Field(3600.0, gt=0)
    """Seconds from admission to the end of the answer; then the request ends with 504, or its stream with an error."""
    stall_timeout_s: float = Field(60.0, gt=0)
    """Seconds without a token, while requests run, after which `/health` says `stalled`."""
    key_max_concurrent: int = Field(0, ge=0)
    """Most requests of one API key at once; 0: no limit. Without keys, of all callers together."""
    key_requests_per_minute: int = Field(0, ge=0)
    """Most requests of one API key a minute, in bursts of up to so many; 0: no limit. Without keys, of all callers."""
    cors_origins: Annotated[tuple[str, ...], NoDecode] = ()
    """Origins, such as `https://chat.example.com`, whose pages may call the API; `*`: all. Empty: none."""
    retry_after_s: int = Field(1, ge=1)
    """Value of Retry-After on 429 and 503, in seconds."""
    drain_timeout_s: int = Field(30, ge=0)
    """Seconds that running requests get to finish after a termination signal."""

    @field_validator("served_model_names", "cors_origins", mode="before")
    @classmethod
    def _split_names(cls, value: object) -> object:
        return tuple(name.strip() for name in value.split(",") if name.strip()) if isinstance(value, str) else value

    def resolved_grpc_port(self, port: int) -> int:
        """Port of the text gRPC service when the REST API is bound to `port`."""
        return self.grpc_port or port + 1

    def resolved_model_dir(self) -> Path:
        """The model directory. Raises ConfigurationError when it is unset or not a directory."""
        key = "DSPARK_GATEWAY_MODEL_DIR"
        if self.model_dir is None:
            raise ConfigurationError(f"{key} is not set: give the directory with the target's tokenizer", field=key)
        if not self.model_dir.is_dir():
            raise ConfigurationError(f"{key}: {self.model_dir} is not a directory", field=key)
        return self.model_dir

    def resolved_model_names(self) -> tuple[str, ...]:
        """Served names, at least one."""
        return self.served_model_names or (self.resolved_model_dir().resolve().name,)

    def resolved_api_keys(self) -> tuple[str, ...]:
        """All API keys. Raises ConfigurationError for a missing or empty file (never falls back to open access)."""
        keys = [key.strip() for key in self.api_keys.get_secret_value().split(",") if key.strip()]
        if self.api_keys_file is not None:
            key_name = "DSPARK_GATEWAY_API_KEYS_FILE"
            try:
                lines = self.api_keys_file.read_text().splitlines()
            except OSError as error:
                raise ConfigurationError(f"{key_name}: {error}", field=key_name) from error
            from_file = [line.strip() for line in lines if line.strip()]
            if not from_file:
                raise ConfigurationError(f"{key_name}: {self.api_keys_file} holds no key", field=key_name)
            keys += from_file
        return tuple(keys)
