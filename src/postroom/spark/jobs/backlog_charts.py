"""Charts of a backlog: PNG files, drawn without a screen."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import InvalidSetting, UsageError
from ...install import how_to_install

if TYPE_CHECKING:
    from .backlog import Backlogged

__all__ = ["draw"]

_BLUE, _ORANGE, _RED, _GREY = "#1f6fb4", "#e08214", "#b2182b", "#888888"


def draw(found: Backlogged, folder: str) -> list[str]:
    """Files in the folder, which is made: arrival.png, and if they are known backlog.png and waiting.png."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError(f"charts need matplotlib: {how_to_install('spark')}") from None
    try:
        Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidSetting(f"charts={folder!r}: the folder cannot be made: {error.strerror}") from None
    times = [datetime.fromtimestamp(w.start_ms / 1000, UTC) for w in found.windows]
    files = []
    for name, title, unit, lines in _charts(found):
        figure = Figure(figsize=(10, 4), layout="constrained")  # has no window, whatever the backend
        axes: Any = figure.subplots()
        for label, colour, values in lines:
            axes.plot(
                times, values, label=label, color=colour, linewidth=1.5, marker="." if len(times) < 50 else ""
            )
        axes.set_title(f"{found.topic}: {title}", loc="left")
        axes.set_ylabel(unit)
        axes.set_xlabel("UTC")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(loc="upper left", frameon=False)
        figure.autofmt_xdate()
        files.append(str(Path(folder, name)))
        figure.savefig(files[-1], dpi=100)
    return files


Line = tuple[str, str, list[float]]


def _charts(found: Backlogged) -> list[tuple[str, str, str, Sequence[Line]]]:
    windows, second = found.windows, found.window_ms / 1000
    per_s: list[Line] = [("arrived", _BLUE, [w.arrived / second for w in windows])]
    charts: list[tuple[str, str, str, Sequence[Line]]] = []
    if found.source != "arrival":
        per_s.append(("handled", _ORANGE, _numbers([w.handled for w in windows], 1 / second)))
    charts.append(("arrival.png", "arrival and handling", "messages a second", per_s))
    if found.source == "arrival":
        return charts
    behind: list[Line] = [("behind", _RED, _numbers([w.behind for w in windows], 1))]
    charts.append(("backlog.png", "messages behind", "messages", behind))
    if found.source == "journal":
        waits = [w.waits for w in windows]
        lines: list[Line] = [
            (name, colour, _numbers([None if w is None else getattr(w, f"{name}_ms") for w in waits], 0.001))
            for name, colour in (("p50", _BLUE), ("p95", _ORANGE), ("p99", _RED), ("max", _GREY))
        ]
    else:
        lines = [("about", _BLUE, _numbers([w.about_wait_ms for w in windows], 0.001))]
    charts.append(("waiting.png", "waiting time", "seconds", lines))
    return charts


def _numbers(values: Sequence[Any], times: float) -> list[float]:
    """A hole in the line where nobody knows."""
    return [float("nan") if value is None else value * times for value in values]
