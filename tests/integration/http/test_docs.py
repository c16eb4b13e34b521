"""The examples on the page about HTTP do what they show, against a broker whose port stands in theirs."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks
from tests.docs.test_snippets import run_console
from tests.integration.http.test_http import served

PAGE = ROOT / "docs" / "howto" / "http.md"
SHOWN = "localhost:7071"


async def test_the_page_does_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("curl") is None:
        pytest.skip("there is no curl on this machine")
    monkeypatch.chdir(tmp_path)
    shown = [block for block in blocks(PAGE) if block.language == "console" and "curl" in block.text]
    assert len(shown) >= 5
    async with served() as (_, _, http):
        for block in shown:
            text = block.text.replace(SHOWN, f"localhost:{http.port}")
            await asyncio.to_thread(run_console, replace(block, text=text))
