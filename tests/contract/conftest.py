"""Where the tests of the SDK run: a test that takes `any_url` runs in memory and on a file.

One that is marked `everywhere` (tests.contract.stores) runs on the database servers too; with
PENSTOCK_TEST_STORES=all every one does, which takes some minutes.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.contract.stores import EVERYWHERE, HERE, SERVERS

_STORES = EVERYWHERE if os.environ.get("PENSTOCK_TEST_STORES") == "all" else HERE


@pytest.fixture(params=_STORES)
def any_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty store; connections to it ask for `migrate=True`."""
    if request.param in SERVERS:
        return str(request.getfixturevalue(SERVERS[request.param]))
    return f"sqlite:///{tmp_path}/q.db" if request.param == "sqlite" else f"memory://{tmp_path.name}"
