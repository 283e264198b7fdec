"""Settings, keys and error bodies of the gateway."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.auth import ApiKeys
from gateway.errors import AuthenticationError, ContextLengthError, UnknownModelError, to_http
from gateway.settings import GatewaySettings
from service_kit.errors import ConfigurationError, InvalidRequestError, QueueFullError, UnavailableError
from service_kit.settings import load_settings


def test_lists_and_ports_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DSPARK_GATEWAY_SERVED_MODEL_NAMES", "big, small")
    monkeypatch.setenv("DSPARK_GATEWAY_API_KEYS", "first-key,second-key")
    monkeypatch.setenv("DSPARK_GATEWAY_MODEL_DIR", str(tmp_path))
    settings = load_settings(GatewaySettings)
    assert settings.resolved_model_names() == ("big", "small")
    assert settings.resolved_api_keys() == ("first-key", "second-key")
    assert "first-key" not in repr(settings)
    assert settings.resolved_grpc_port(8000) == 8001


def test_a_bad_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPARK_GATEWAY_PORT", "99999")
    with pytest.raises(ConfigurationError, match="DSPARK_GATEWAY_PORT"):
        load_settings(GatewaySettings)


def test_the_model_directory_is_required(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="DSPARK_GATEWAY_MODEL_DIR is not set"):
        GatewaySettings().resolved_model_dir()
    with pytest.raises(ConfigurationError, match="not a directory"):
        GatewaySettings(model_dir=tmp_path / "x").resolved_model_dir()
    assert GatewaySettings(model_dir=tmp_path).resolved_model_names() == (tmp_path.name,)


def test_key_files(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("a\n\n b \n")
    assert GatewaySettings(api_keys="c", api_keys_file=path).resolved_api_keys() == ("c", "a", "b")
    path.write_text("\n")
    with pytest.raises(ConfigurationError, match="holds no key"):
        GatewaySettings(api_keys_file=path).resolved_api_keys()
    with pytest.raises(ConfigurationError, match="API_KEYS_FILE"):
        GatewaySettings(api_keys_file=tmp_path / "absent").resolved_api_keys()


@pytest.mark.parametrize("header", [None, "", "one", "Bearer", "Bearer ", "Bearer three", "Basic one", "Bearer onetwo"])
def test_wrong_keys(header: str | None) -> None:
    with pytest.raises(AuthenticationError):
        ApiKeys(["one", "two"]).require(header)


def test_right_keys() -> None:
    for header in ("Bearer one", "bearer two"):
        ApiKeys(["one", "two"]).require(header)
    ApiKeys([]).require(None)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InvalidRequestError("x", field="top_p"), 400, None),
        (ContextLengthError("x"), 400, "context_length_exceeded"),
        (UnknownModelError("x"), 404, "model_not_found"),
        (QueueFullError("x"), 429, "queue_full"),
        (UnavailableError("x"), 503, "unavailable"),
        (ValueError("secret"), 500, "internal"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_error_bodies(error: Exception, status: int, code: str | None) -> None:
    http = to_http(error)
    assert http.status == status
    assert set(http.body["error"]) == {"message", "type", "param", "code"}
    assert http.body["error"]["code"] == code
    assert "secret" not in str(http.body)
