"""`Access`: principals, and the hashes of their secrets (R48)."""

from __future__ import annotations

import pytest

from ...errors import PrincipalExists, UnknownPrincipal
from ...model.access import ALL, Permission, Principal
from ...store.contract import Store
from .harness import MovableClock, StoreHarness, in_threads

__all__ = ["AccessContract"]

SEND, CONSUME = Permission("send", "orders"), Permission("consume", "orders.*")
A, B = "a" * 64, "b" * 64


class AccessContract(StoreHarness):
    def test_a_principal_is_known_to_all(self, store: Store, other: Store, clock: MovableClock) -> None:
        made = store.access.add(Principal("shop", (SEND, CONSUME)), A)
        assert made == Principal("shop", (SEND, CONSUME), clock.ms)
        for each in (store, other):
            assert each.access.by_name("shop") == each.access.by_secret(A) == made
            assert each.access.principals() == [made]
        assert other.access.by_secret(A).secret_hash == A  # type: ignore[union-attr]

    def test_names_and_secrets_that_nobody_has(self, store: Store) -> None:
        store.access.add(Principal("shop", ()), A)
        assert store.access.by_secret(B) is None
        assert store.access.by_secret(A[:-1]) is None
        assert store.access.by_name("Shop") is None
        assert not store.access.remove("Shop")

    def test_a_principal_without_a_secret_is_found_by_name_only(self, store: Store) -> None:
        store.access.add(Principal("shop", ALL), "")
        assert store.access.by_secret("") is None
        assert store.access.by_name("shop") is not None

    def test_of_two_who_make_a_principal_one_does(self, store: Store, other: Store) -> None:
        def made(through: Store, secret_hash: str) -> bool:
            try:
                through.access.add(Principal("admin", ALL), secret_hash)
            except PrincipalExists:
                return False
            return True

        calls = [
            lambda through=through, digit=digit: made(through, digit * 64)
            for through, digit in zip([store, other] * 2, "1234", strict=True)
        ]
        answers = in_threads(*calls)
        assert sum(answers) == 1
        assert store.access.by_secret("1234"[answers.index(True)] * 64) is not None

    def test_put_changes_permissions_and_leaves_the_secret(self, store: Store, clock: MovableClock) -> None:
        made = store.access.add(Principal("shop", (SEND,)), A)
        clock.ms += 1000
        store.access.put(Principal("shop", (CONSUME,)), None)
        assert store.access.by_secret(A) == Principal("shop", (CONSUME,), made.created_at)

    def test_put_changes_the_secret(self, store: Store, other: Store) -> None:
        store.access.put(Principal("shop", (SEND,)), A)
        other.access.put(Principal("shop", (SEND,)), B)
        assert store.access.by_secret(A) is None
        assert store.access.by_secret(B) is not None

    def test_nothing_is_made_without_a_secret_that_stays(self, store: Store) -> None:
        with pytest.raises(UnknownPrincipal):
            store.access.put(Principal("shop", (SEND,)), None)
        with pytest.raises(UnknownPrincipal):
            store.access.permit("shop", (SEND,), ())
        assert store.access.principals() == []

    def test_permissions_come_and_go_one_by_one(self, store: Store) -> None:
        store.access.add(Principal("shop", (SEND,)), A)
        assert store.access.permit("shop", (CONSUME, SEND), ()).permissions == (SEND, CONSUME)
        assert store.access.permit("shop", (), (SEND, Permission("manage", "*"))).permissions == (CONSUME,)
        assert store.access.by_secret(A) == store.access.by_name("shop")
        assert store.access.permit("shop", (), (CONSUME,)).permissions == ()
        assert store.access.by_name("shop").permissions == ()  # type: ignore[union-attr]

    def test_grants_at_once_are_all_kept(self, store: Store, other: Store) -> None:
        store.access.add(Principal("shop", ()), A)
        wanted = [Permission("send", f"topic{number}") for number in range(4)]
        calls = [
            lambda through=through, one=one: through.access.permit("shop", (one,), ())
            for through, one in zip([store, other] * 2, wanted, strict=True)
        ]
        in_threads(*calls)
        assert set(store.access.by_name("shop").permissions) == set(wanted)  # type: ignore[union-attr]

    def test_a_principal_that_was_removed_is_gone(self, store: Store, other: Store) -> None:
        store.access.add(Principal("shop", ALL), A)
        store.access.add(Principal("audit", ALL), B)
        assert other.access.remove("shop")
        assert not other.access.remove("shop")
        assert store.access.by_secret(A) is None and store.access.by_name("shop") is None
        assert [principal.name for principal in store.access.principals()] == ["audit"]

    def test_the_queue_has_one_key_for_all(self, store: Store, other: Store) -> None:
        """I23: every broker of a queue tells producers of principals apart alike."""
        found: list[bytes] = []
        in_threads(*(lambda one=one: found.append(one.access.key()) for one in (store, other)))
        assert len({*found, store.access.key(), other.access.key()}) == 1
        assert len(found[0]) == 32 and len(set(found[0])) > 8

    def test_principals_are_listed_by_name(self, store: Store) -> None:
        for name in ("shop", "audit", "Zoo", "billing"):
            store.access.add(Principal(name, ()), name)
        assert [p.name for p in store.access.principals()] == ["Zoo", "audit", "billing", "shop"]
