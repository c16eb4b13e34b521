"""Merges small files of archives into large ones: `compact.py FOLDER TOPIC …`. May run beside the archive."""

from __future__ import annotations

import os
import sys

from postroom.spark.jobs.archive import ArchiveOptions, compact


def main(folder: str, *topics: str) -> None:
    for topic in topics:
        done = compact(ArchiveOptions({"url": os.environ["POSTROOM_URL"]}, topic, folder))
        print(topic, done.files_before, "files before,", done.files_after, "after")


if __name__ == "__main__":
    main(*sys.argv[1:])
