"""The pictures of the documentation, drawn by code: what is in a picture can be read in a diff.

    python -m tools.docs.pictures           # write docs/pictures/*.svg
    python -m tools.docs.pictures --check   # exit code 1 if one is out of date

A picture is boxes on a grid, arrows between them and a few words. Must never depend on a font or a machine:
letters are counted, not measured.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

__all__ = ["PICTURES", "Box", "Picture"]

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "pictures"
INK, PAPER, LINE = "#1f2933", "#ffffff", "#52606d"
FILLS = {"program": "#e0f2f1", "store": "#fff3d6", "group": "#e3e8f8", "worker": "#e0f2f1", "end": "#fbe4e1"}
FONT = "font-family='system-ui, sans-serif' font-size='14'"
MARGIN, LETTER = 16, 7.6


@dataclass(frozen=True)
class Box:
    x: int
    y: int
    text: str
    kind: str = "program"
    width: int = 150
    height: int = 40

    def side(self, name: str) -> tuple[float, float]:
        middle = self.x + self.width / 2, self.y + self.height / 2
        return {
            "left": (self.x, middle[1]),
            "right": (self.x + self.width, middle[1]),
            "top": (middle[0], self.y),
            "bottom": (middle[0], self.y + self.height),
        }[name]


@dataclass
class Picture:
    title: str
    width: int
    height: int
    shapes: list[str] = field(default_factory=list)

    def frame(self, x: int, y: int, width: int, height: int, text: str) -> None:
        """A dashed room around other boxes, with its name at the bottom."""
        self.shapes.append(
            f"<rect x='{x}' y='{y}' width='{width}' height='{height}' rx='8' fill='none' stroke='{LINE}' "
            "stroke-dasharray='5 4'/>"
        )
        self.words(x + width / 2, y + height - 10, text, middle=True)

    def box(self, box: Box) -> Box:
        assert len(box.text) * LETTER <= box.width, f"{box.text!r} does not fit its box"
        self.shapes.append(
            f"<rect x='{box.x}' y='{box.y}' width='{box.width}' height='{box.height}' rx='6' "
            f"fill='{FILLS[box.kind]}' stroke='{LINE}'/>"
        )
        self.words(box.x + box.width / 2, box.y + box.height / 2 + 5, box.text, middle=True)
        return box

    def words(self, x: float, y: float, text: str, *, middle: bool = False) -> None:
        room = 2 * min(x, self.width - x) if middle else self.width - x
        assert len(text) * LETTER <= room, f"{text!r} leaves the picture"
        anchor = " text-anchor='middle'" if middle else ""
        self.shapes.append(f"<text x='{x:g}' y='{y:g}'{anchor}>{escape(text)}</text>")

    def arrow(
        self, start: tuple[float, float], end: tuple[float, float], text: str = "", *, dashed: bool = False
    ) -> None:
        (x1, y1), (x2, y2) = start, end
        dash = " stroke-dasharray='5 4'" if dashed else ""
        self.shapes.append(
            f"<line x1='{x1:g}' y1='{y1:g}' x2='{x2:g}' y2='{y2:g}' stroke='{LINE}' stroke-width='1.5'{dash} "
            "marker-end='url(#tip)'/>"
        )
        if text:
            self.words((x1 + x2) / 2, (y1 + y2) / 2 - 7, text, middle=True)

    def svg(self) -> str:
        tip = (
            "<marker id='tip' viewBox='0 0 10 10' refX='9' refY='5' markerWidth='8' markerHeight='8' "
            f"orient='auto'><path d='M0 0 L10 5 L0 10 z' fill='{LINE}'/></marker>"
        )
        head = (
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {self.width} {self.height}' role='img' "
            f"width='{self.width}' height='{self.height}' {FONT} fill='{INK}'>"
        )
        paper = f"<rect width='{self.width}' height='{self.height}' rx='10' fill='{PAPER}'/>"
        lines = [head, f"<title>{escape(self.title)}</title>", f"<defs>{tip}</defs>", paper, *self.shapes]
        return "\n".join([*lines, "</svg>"]) + "\n"


def flow() -> Picture:
    """How a message travels from programs through a topic to groups."""
    picture = Picture("Programs send to a topic; every group gets every message", 900, 280)
    senders = [
        picture.box(Box(MARGIN, y, text))
        for y, text in ((40, "web app: outbox"), (110, "scripts: send"), (180, "HTTP, Spark, Kafka"))
    ]
    picture.frame(260, 16, 220, 240, "topic orders: your database")
    partitions = [picture.box(Box(285, 40 + 60 * n, f"partition {n}", "store", width=170)) for n in range(3)]
    groups = [
        picture.box(Box(560, y, text, "group", width=140))
        for y, text in ((60, "group billing"), (160, "group ledger"))
    ]
    workers = [picture.box(Box(770, y, "workers", "worker", width=110)) for y in (60, 160)]
    for sender, partition in zip(senders, partitions, strict=True):
        picture.arrow(sender.side("right"), partition.side("left"))
    for group, worker in zip(groups, workers, strict=True):
        picture.arrow((480, group.side("left")[1]), group.side("left"))
        picture.arrow(group.side("right"), worker.side("left"))
    picture.words(560, 122, "each message to one worker; retries")
    picture.words(560, 222, "mode=ordered: each key in order")
    return picture


def delivery() -> Picture:
    """How a delivery lives between the poll and its end."""
    picture = Picture("A delivery is in flight until it is acked, retried, released or dead", 900, 250)
    log = picture.box(Box(MARGIN, 40, "in the log", "store", width=130))
    flight = picture.box(Box(290, 40, "in flight, leased", "group", width=160))
    acked = picture.box(Box(720, 40, "acked", "worker", width=160))
    picture.box(Box(290, 180, "until it is due", "store", width=160))
    picture.box(Box(720, 180, "dead letters", "end", width=160))
    picture.arrow(log.side("right"), flight.side("left"), "poll")
    picture.arrow(flight.side("right"), acked.side("left"), "ack")
    picture.arrow((320, 80), (320, 180))
    picture.arrow((420, 180), (420, 80))
    picture.words(MARGIN, 120, "retry: an attempt")
    picture.words(MARGIN, 140, "release: no attempt")
    picture.words(MARGIN, 160, "lease ends: in halves, then alone")
    picture.words(430, 135, "poll again")
    picture.arrow((450, 75), (720, 190))
    picture.words(600, 120, "dead, or the last attempt failed")
    return picture


def shapes() -> Picture:
    """The ways to run it: embedded, on a server, served, on several databases."""
    picture = Picture(
        "Embedded in a program, on a database server, behind brokers, on several databases", 900, 250
    )
    columns = (
        (16, "one machine", ("program", "program"), ("SQLite file",)),
        (236, "a database server", ("web", "workers"), ("PostgreSQL",)),
        (456, "brokers before it", ("clients", "brokers"), ("PostgreSQL",)),
        (676, "several databases", ("programs", "brokers"), ("shard 1", "shard 2")),
    )
    for x, name, programs, stores in columns:
        picture.frame(x, 16, 208, 218, name)
        upper = _row(picture, x, 36, programs, "program")
        lower = _row(picture, x, 140, stores, "store")
        if "brokers" in programs:
            picture.arrow(upper[0].side("right"), upper[1].side("left"))
            upper = upper[1:]
        for one in upper:
            for store in lower:
                picture.arrow(one.side("bottom"), store.side("top"))
    return picture


def _row(picture: Picture, x: int, y: int, texts: tuple[str, ...], kind: str) -> list[Box]:
    width = 84 if len(texts) > 1 else 120
    left = x + (208 - len(texts) * width - (len(texts) - 1) * 14) // 2
    return [
        picture.box(Box(left + n * (width + 14), y, text, kind, width=width)) for n, text in enumerate(texts)
    ]


PICTURES = {"flow.svg": flow, "delivery.svg": delivery, "shapes.svg": shapes}


def main() -> int:
    stale = []
    for name, draw in PICTURES.items():
        text, path = draw().svg(), FOLDER / name
        if "--check" not in sys.argv[1:]:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
    if stale:
        print(f"out of date: {', '.join(stale)}: run `make pictures`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
