"""The jar that comes with the package is the one of the sources beside it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from postroom.errors import InvalidSetting
from postroom.spark import jar, settings


def test_it_was_built_from_these_sources() -> None:
    with ZipFile(jar.JAR) as packed:
        assert packed.read(jar.DIGEST).decode().strip() == jar.digest(), "make jar"
        names = set(packed.namelist())
    sources = {source.stem for source in jar.SOURCES.glob("*.java")}
    assert {f"postroom/spark/{name}.class" for name in sources} <= names
    assert jar.CATALOG.replace(".", "/") + ".class" in names
    assert jar.JAR.stat().st_size < 20_000


@pytest.mark.slow("starts the Java compiler twice")
@pytest.mark.skipif(shutil.which("javac") is None, reason="there is no javac here")
def test_the_sources_compile_and_the_same_ones_give_the_same_jar(tmp_path: Path) -> None:
    for name in ("one.jar", "two.jar"):
        jar.build(tmp_path / name)
    assert (tmp_path / "one.jar").read_bytes() == (tmp_path / "two.jar").read_bytes()
    with ZipFile(tmp_path / "one.jar") as built, ZipFile(jar.JAR) as packed:
        assert built.namelist() == packed.namelist()


def test_where_it_is() -> None:
    command = [sys.executable, "-W", "error", "-m", "postroom.spark.jar"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert Path(said.stdout.strip()) == jar.JAR


def test_settings_have_it_and_catalogs() -> None:
    found = settings(
        "local[2]",
        config={"spark.jars": "other.jar"},
        catalog={"mq": {"url": "postroom://h:7070", "failOnDataLoss": False}, "lite": "sqlite:////q.db"},
    )
    assert found["spark.jars"] == f"other.jar,{jar.JAR}"
    assert {name: value for name, value in found.items() if ".catalog." in name} == {
        "spark.sql.catalog.mq": jar.CATALOG,
        "spark.sql.catalog.mq.url": "postroom://h:7070",
        "spark.sql.catalog.mq.failOnDataLoss": "false",
        "spark.sql.catalog.lite": jar.CATALOG,
        "spark.sql.catalog.lite.url": "sqlite:////q.db",
    }
    assert settings("local[2]")["spark.jars"] == str(jar.JAR)
    with pytest.raises(InvalidSetting, match=r"catalog 'a\.b': a name has letters, digits and _"):
        settings("local[2]", catalog={"a.b": "sqlite:////q.db"})
