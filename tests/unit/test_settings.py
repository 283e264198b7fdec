"""Settings: unknown keys and bad values stop start-up and are named."""

from __future__ import annotations

import pytest
from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from service_kit.errors import ConfigurationError
from service_kit.settings import CommonSettings, load_settings


class ExampleSettings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="DSPARK_VERIFIER_", frozen=True, extra="forbid")

    threads: int = Field(default=0, ge=0)


def test_values_come_from_the_environment_and_overrides_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPARK_VERIFIER_THREADS", "3")
    assert load_settings(ExampleSettings).threads == 3
    assert load_settings(ExampleSettings, threads=5).threads == 5


def test_a_bad_value_names_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPARK_VERIFIER_THREADS", "-1")
    with pytest.raises(ConfigurationError, match="DSPARK_VERIFIER_THREADS"):
        load_settings(ExampleSettings)


@pytest.mark.parametrize("key", ["DSPARK_VERIFIER_THREDS", "DSPARK_LOGLEVEL"])
def test_an_unknown_key_is_named(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(key, "1")
    with pytest.raises(ConfigurationError, match=key):
        load_settings(ExampleSettings)


def test_other_services_keys_are_theirs_to_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPARK_GATEWAY_PORT", "8000")
    monkeypatch.setenv("DSPARK_LOG_LEVEL", "debug")
    assert load_settings(ExampleSettings).threads == 0
    assert load_settings(CommonSettings).log_level == "debug"
