"""A password in an address is never shown: not in errors, as JSON, by the doctor, or in a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from postroom.cli.root import run
from tests.contract.cli_runner import Cli

SECRET = "hunter2"
NOWHERE = "127.0.0.1:1"  # nobody listens there

BAD = [
    f"ann:{SECRET}@{NOWHERE}/q",
    f"a:{SECRET}@{NOWHERE}/q",
    f"postgresq://ann:{SECRET}@{NOWHERE}/q",
    f"postgresql:/ann:{SECRET}@{NOWHERE}/q",
    f"postgresql://ann:{SECRET}@{NOWHERE}",
    f"postgresql://ann:{SECRET}/x@{NOWHERE}/q",
    f"postgresql://ann:{SECRET}%zz@{NOWHERE}/q",
    f"postgresql://ann:{SECRET}#x@{NOWHERE}/q",
    f"postgresql://ann:{SECRET}@127.0.0.1:port/q",
    f"mysql://ann:{SECRET}@{NOWHERE}/q?nonsense=1",
]
AWAY = [
    f"postgresql://ann:{SECRET}@{NOWHERE}/q",
    f"postgresql://{NOWHERE}/q?user=ann&password={SECRET}",
    f"mysql://ann:{SECRET}@{NOWHERE}/q",
]


@pytest.mark.parametrize("url", BAD)
@pytest.mark.parametrize("words", [["topic", "list"], ["doctor"], ["migrate"]], ids=" ".join)
def test_an_address_that_cannot_be_read(
    url: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for more in ([], ["--json"]):
        assert run([*words, "--url", url, *more]) == 2
        captured = capsys.readouterr()
        assert SECRET not in captured.out + captured.err and captured.err.count("\n") == 1


@pytest.mark.parametrize("url", AWAY)
@pytest.mark.parametrize("words", [["topic", "list"], ["doctor"], ["migrate", "--check"]], ids=" ".join)
def test_a_server_that_is_away(url: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for more in ([], ["--json"]):
        assert run([*words, "--url", url, *more]) == 1
        captured = capsys.readouterr()
        assert SECRET not in captured.out + captured.err
        assert "check host and port" in captured.out + captured.err


@pytest.mark.few(1, "starts programs")
@pytest.mark.parametrize("url", AWAY)
def test_a_traceback(url: str, tmp_path: Path) -> None:
    answer = Cli(tmp_path, url).process("topic", "list", "--debug")
    assert answer.code == 1 and "Traceback" in answer.err and SECRET not in answer.err


def test_the_servers_own_refusal(postgres_url: str, mysql_url: str, tmp_path: Path) -> None:
    for url in (postgres_url, mysql_url):
        start, _, rest = url.partition("://")
        wrong = f"{start}://postroom:{SECRET}@{rest.rpartition('@')[2]}"
        for words in (["topic", "list"], ["migrate"], ["doctor"]):
            answer = Cli(tmp_path, wrong)(*words, "--json")
            assert answer.code == 1 and "password" in answer.out + answer.err
            assert SECRET not in answer.out + answer.err
        answer = Cli(tmp_path, wrong)("topic", "list", "--json")
        assert answer.error["error"] == "access_denied"
