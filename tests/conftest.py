"""Settings every test shares. Fixtures live next to the tests that need them; databases: `tests.servers`."""

from __future__ import annotations

import os

from hypothesis import settings

from tests.model.examples import examples

pytest_plugins = [
    "tests.interrupts",
    "tests.commands",
    "tests.servers.fixtures",
    "tests.ready",
    "tests.rerun",
    "tests.sharing",
    "tests.tiers",
    "tests.tuned",
]

# A deadline per example measures the machine, not the code; pytest-timeout guards against hangs.
settings.register_profile("dev", deadline=None, max_examples=examples(100))
settings.register_profile("ci", deadline=None, derandomize=False, print_blob=True)
settings.register_profile("thorough", parent=settings.get_profile("ci"), max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))
