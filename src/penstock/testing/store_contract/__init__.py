"""The conformance suite of the store contract. A store that passes it can carry Penstock.

    import pytest
    pytest.register_assert_rewrite("penstock.testing.store_contract")  # before the import: better messages
    from penstock.testing.store_contract import StoreContract

    class TestMyStore(StoreContract):
        def open_store(self, tmp_path, clock):
            return MyStore(tmp_path / "store", clock)        # new and empty, on that clock

        def reopen(self, tmp_path, clock):
            return MyStore(tmp_path / "store", clock)        # the same data, as another process sees it

Each verb of `penstock.store.contract` and each promise in its docstrings has a test here; the names of the
tests are the promises. `harness` says what else a store that is not built on `SqlStore` has to provide.
"""

from __future__ import annotations

from .appending import AppendContract
from .harness import MovableClock, StoreHarness

__all__ = ["MovableClock", "StoreContract", "StoreHarness"]


class StoreContract(AppendContract):
    """All of it."""
