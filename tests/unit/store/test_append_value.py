"""A batch that is appended is made once as it is stored, for the store and for those who read it."""

from __future__ import annotations

from dataclasses import replace

from postroom.model.messages.batch import BatchBuilder, read_header, with_base_offset
from postroom.store.contract import Append


def batch(value: bytes) -> bytes:
    builder = BatchBuilder()
    builder.append(1, None, value, [])
    return builder.build()


def test_what_is_stored_at_an_offset_is_made_once() -> None:
    append = Append(1, batch(b"paid"))
    assert append.at(7) is append.at(7)
    assert append.at(7) == with_base_offset(append.batch, 7)


def test_another_try_at_another_offset_gets_its_own() -> None:
    append = Append(1, batch(b"paid"))
    first = append.at(7)
    assert append.at(9) == with_base_offset(append.batch, 9) != first
    assert append == Append(1, append.batch), "what was made of it is no part of the value"


def test_another_batch_does_not_get_what_was_made_of_the_first() -> None:
    append = Append(1, batch(b"paid"))
    append.at(7)
    other = replace(append, batch=batch(b"late"))
    assert other.at(7) == with_base_offset(other.batch, 7) and read_header(other.at(7)).records == 1
