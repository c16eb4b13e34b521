from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.errors import InvalidSetting
from postroom.units import duration_ms, format_bytes, format_duration, moment_ms, size_bytes


@pytest.mark.parametrize(
    ("value", "ms"),
    [
        (0, 0),
        (30, 30_000),
        (0.25, 250),
        (0.1, 100),
        (0.00001, 1),  # short, but not nothing
        (timedelta(minutes=2, milliseconds=5), 120_005),
        ("250ms", 250),
        ("10s", 10_000),
        ("1.5s", 1_500),
        ("10m", 600_000),
        ("2h", 7_200_000),
        ("7d", 604_800_000),
        ("1w", 604_800_000),
        ("1h30m", 5_400_000),
        ("1h 30m", 5_400_000),
        (" 10 s ", 10_000),
        ("30", 30_000),
        ("0s", 0),
    ],
)
def test_durations(value: Any, ms: int) -> None:
    assert duration_ms(value) == ms


@pytest.mark.parametrize(
    "value",
    [-1, -0.5, float("nan"), float("inf"), 10**400, True, False, None, b"10s", [], timedelta(seconds=-1), "",
     " ", "s", "ten", "10x", "10 minutes", "-5s", "+5s", "1h-30m", "10s!", "1..5s", ".5s", "1e3s", "nan",
     "inf", "٣s", "9" * 400 + "s", "2000000w"],
)  # fmt: skip
def test_bad_durations_name_the_setting_and_an_example(value: Any) -> None:
    with pytest.raises(InvalidSetting, match=r'lease must be .*"10m"') as caught:
        duration_ms(value, name="lease")
    assert caught.value.details == {"name": "lease"}


@given(st.integers(0, 10**12))
def test_whole_milliseconds_survive_each_spelling(ms: int) -> None:
    assert duration_ms(ms / 1000) == duration_ms(timedelta(milliseconds=ms)) == duration_ms(f"{ms}ms") == ms


def test_moments() -> None:
    moment = datetime(2030, 1, 31, 8, 0, 0, 123_000, tzinfo=UTC)
    assert moment_ms(moment) == 1_896_076_800_123
    assert moment_ms(moment.astimezone(timezone(timedelta(hours=9)))) == 1_896_076_800_123
    assert moment_ms("2030-01-31T08:00:00.123Z") == 1_896_076_800_123
    assert moment_ms(1_896_076_800) == moment_ms(1_896_076_800.0) == 1_896_076_800_000


def test_a_naive_datetime_is_refused_with_the_remedy() -> None:
    for naive in (datetime(2030, 1, 31), "2030-01-31T08:00:00"):
        with pytest.raises(InvalidSetting, match=r"at has no time zone: use timezone\.utc"):
            moment_ms(naive, name="at")


@pytest.mark.parametrize(
    "value", [True, None, "tomorrow", -1, float("nan"), 1_896_076_800_000, timedelta(seconds=1), 10**400]
)
def test_bad_moments_name_the_setting(value: Any) -> None:
    with pytest.raises(InvalidSetting, match=r"^at must be "):
        moment_ms(value, name="at")


@pytest.mark.parametrize(
    ("value", "size"),
    [(0, 0), (65_536, 65_536), (2**60 - 1, 2**60 - 1), ("512", 512), ("512B", 512), ("64KB", 65_536),
     ("64kb", 65_536), ("64 MB", 67_108_864), ("64MiB", 67_108_864), ("1.5GB", 3 << 29), ("1TB", 2**40)],
)  # fmt: skip
def test_sizes(value: Any, size: int) -> None:
    assert size_bytes(value) == size


@pytest.mark.parametrize(
    "value",
    [-1, True, 1.5, None, "", "MB", "64XB", "-1MB", "0.3B", "64M B", 10**400, "9" * 400, float("nan")],
)
def test_bad_sizes_name_the_setting_and_an_example(value: Any) -> None:
    with pytest.raises(InvalidSetting, match=r'window must be .*"64KB"'):
        size_bytes(value, name="window")


@pytest.mark.parametrize(
    ("ms", "text"),
    [(0, "0ms"), (999, "999ms"), (1_000, "1s"), (1_234, "1.2s"), (59_999, "59.9s"), (60_000, "1m"),
     (190_000, "3m 10s"), (3_599_999, "59m 59s"), (3_600_000, "1h"), (7_500_000, "2h 5m"), (86_400_000, "1d"),
     (788_400_000, "9d 3h"), (-1_234, "-1.2s")],
)  # fmt: skip
def test_formatted_durations(ms: int, text: str) -> None:
    assert format_duration(ms) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KB"), (1536, "1.5 KB"), (1024**2 - 1, "1023.9 KB"),
     (64 * 1024**2, "64 MB"), (5 * 1024**3, "5 GB"), (2048 * 1024**4, "2048 TB"), (-2048, "-2 KB")],
)  # fmt: skip
def test_formatted_sizes(size: int, text: str) -> None:
    assert format_bytes(size) == text


@given(st.integers(0, 10**13))
def test_what_is_formatted_can_be_read_again(ms: int) -> None:
    again = duration_ms(format_duration(ms))
    assert again <= ms
    assert ms - again < max(1, ms / 10)
