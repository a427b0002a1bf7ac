"""Settings: flags over environment over defaults; errors name the field."""

from __future__ import annotations

import pytest
from pydantic import Field

from services.runtime.settings import ProcessSettings, load


class Example(ProcessSettings):
    token_budget: int = Field(512, ge=1)


def test_flags_win_over_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_TOKEN_BUDGET", "64")
    monkeypatch.setenv("PDSERVE_PORT", "7000")
    settings = load(Example, "example", ["--token-budget", "128"])
    assert (settings.token_budget, settings.port, settings.host) == (128, 7000, "127.0.0.1")
    assert settings.advertised_host == "127.0.0.1"


@pytest.mark.parametrize(("argv", "field"), [(["--token-budget", "0"], "token_budget"), (["--port", "x"], "port")])
def test_a_wrong_value_is_named(argv: list[str], field: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load(Example, "example", argv)
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith(f"example: {field}:")
