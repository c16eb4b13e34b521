"""Settings of a served broker: where they come from, what is refused, and that no password is shown."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from postroom.errors import InvalidSetting
from postroom.serve_settings import ServeSettings, is_loopback, key_of, read_settings
from tests.docs.pages import ROOT

EXAMPLE = ROOT / "docs" / "examples" / "postroom.toml"


@pytest.fixture
def toml(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        path = tmp_path / "postroom.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def refused(says: str, options: dict[str, Any] | None = None, env: Any = None, config: Any = None) -> str:
    with pytest.raises(InvalidSetting, match=re.escape(says)) as caught:
        read_settings(options or {}, env or {}, config)
    return str(caught.value)


# ---- the example ----


def test_the_example_has_every_key_with_its_default() -> None:
    import tomllib

    found = tomllib.loads(EXAMPLE.read_text(encoding="utf-8"))
    assert set(found) == {key_of(field.name) for field in fields(ServeSettings)}
    assert read_settings({}, {}, EXAMPLE) == ServeSettings()


def test_defaults_are_safe() -> None:
    settings = ServeSettings()
    assert is_loopback(settings.host) and is_loopback(settings.http_host)
    assert not settings.dev and not settings.migrate and not settings.exposed


def test_tokens_that_travel_unhidden_are_noticed_on_both_ports() -> None:
    assert ServeSettings(host="0.0.0.0").exposed
    assert ServeSettings(http_host="0.0.0.0").exposed
    assert not ServeSettings(http_host="0.0.0.0", http_port=0).exposed
    assert not ServeSettings(host="0.0.0.0", tls_cert="a", tls_key="b").exposed


# ---- where they come from ----


def test_options_beat_the_environment_beats_the_file(toml: Any) -> None:
    config = toml('host = "::1"\nport = 1\nzone = "a"\ngrace = "2s"\n')
    env = {"POSTROOM_SERVE_PORT": "2", "POSTROOM_SERVE_ZONE": "b", "POSTROOM_SERVE_MAX_FRAME": "10 MB"}
    found = read_settings({"port": 3, "idle_ms": "3s"}, env, config)
    assert (found.host, found.port, found.zone, found.grace_ms) == ("::1", 3, "b", 2000)
    assert found.idle_ms == 3000
    assert found.max_frame_bytes == 10 << 20
    assert found.max_connections == ServeSettings().max_connections


def test_the_environment_names_the_file(toml: Any) -> None:
    assert read_settings({}, {"POSTROOM_CONFIG": str(toml("port = 1"))}).port == 1
    assert read_settings({}, {"POSTROOM_CONFIG": "/nowhere"}, toml("port = 2")).port == 2


def test_the_address_of_the_store(toml: Any) -> None:
    config = toml('url = "sqlite:///a.db"\n[shards]\nb = "sqlite:///b.db"\nc = "sqlite:///c.db"\n')
    env = {"POSTROOM_URL": "sqlite:///e.db"}
    assert read_settings({}, {}, config).url == "sqlite:///a.db"
    assert read_settings({}, env, config).url == "sqlite:///e.db"
    found = read_settings({"url": "sqlite:///o.db", "shards": {"c": "sqlite:///c2.db"}}, env, config)
    assert found.url == "sqlite:///o.db"
    assert found.shards == {"b": "sqlite:///b.db", "c": "sqlite:///c2.db"}


def test_every_setting_can_be_set_in_the_environment() -> None:
    texts = {
        "dev": "1", "migrate": "TRUE", "host": "localhost", "http_host": "::1", "port": "1",
        "http_port": "0", "advertise": "a:1", "zone": "z", "tls_cert": "c", "tls_key": "k",
        "tls_client_ca": "ca", "max_connections": "5", "reply_topics": "7", "max_frame": "1 GB",
        "max_answer": "1 MB", "answers": "1 GB", "slow_reader": "3s", "unauthenticated": "1.5",
        "idle": "1h", "grace": "0", "log_format": "json", "log_level": "debug",
        "kafka": "9092", "kafka_advertised": "a:9092", "kafka_create_topics": "1",
    }  # fmt: skip
    found = read_settings({}, {f"POSTROOM_SERVE_{key.upper()}": text for key, text in texts.items()})
    untouched = {f.name for f in fields(found) if getattr(found, f.name) == getattr(ServeSettings(), f.name)}
    assert untouched == {"url", "shards"}
    assert (found.dev, found.migrate, found.unauthenticated_ms, found.idle_ms) == (
        True,
        True,
        1500,
        3_600_000,
    )


# ---- what is refused ----


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prot = 1", "'prot' is no setting: did you mean port?"),
        ("grace_ms = 1", "'grace_ms' is no setting: did you mean grace?"),
        ("qqq = 1", "'qqq' is no setting: there are url, shards, migrate, host"),
        ('port = "7070"', "port takes a port from 0 to 65535, such as 7070; not '7070'"),
        ("port = 70000", "port takes a port from 0 to 65535"),
        ("port = true", "port takes a port"),
        ("host = 7", 'host takes text in quotes, such as "127.0.0.1"'),
        ('dev = "yes"', "dev takes true or false, without quotes"),
        ("max_connections = 0", "max_connections takes a whole number of 1 or more, such as 10000"),
        ('log_format = "xml"', "log_format takes one of text, json; not 'xml'"),
        ('idle = "soon"', "idle must be a duration"),
        ('max_frame = "much"', "max_frame must be a whole number of bytes"),
        ('shards = ["a"]', "shards takes addresses by name: [shards]"),
        ("[tls]\ncert = 'x'", "'tls' is no setting"),
        ("port = ", "is not TOML"),
    ],
)
def test_what_a_file_may_not_say(toml: Any, text: str, says: str) -> None:
    path = toml(text)
    assert refused(says, config=path).startswith(str(path))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    refused("cannot be read (No such file or directory): correct --config", config=tmp_path / "no.toml")
    refused("cannot be read", config=tmp_path)


@pytest.mark.parametrize(
    ("variable", "text", "says"),
    [
        ("PROT", "1", "POSTROOM_SERVE_PROT is no setting: did you mean POSTROOM_SERVE_PORT?"),
        ("URL", "sqlite:///a.db", "POSTROOM_SERVE_URL is no setting"),
        ("PORT", "tcp://10.0.0.1:7070", "POSTROOM_SERVE_PORT takes a port"),
        ("PORT", "-1", "POSTROOM_SERVE_PORT takes a port"),
        ("DEV", "maybe", "POSTROOM_SERVE_DEV='maybe' is neither 1 nor 0"),
        ("IDLE", "soon", "POSTROOM_SERVE_IDLE must be a duration"),
    ],
)
def test_what_the_environment_may_not_say(variable: str, text: str, says: str) -> None:
    refused(says, env={f"POSTROOM_SERVE_{variable}": text})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dev": True, "host": "0.0.0.0"}, "set host to 127.0.0.1 instead of '0.0.0.0'"),
        ({"dev": True, "host": "mq.local"}, "leave out dev"),
        ({"dev": True, "http_host": "::"}, "set http_host to 127.0.0.1"),
        ({"tls_cert": "a.pem"}, "tls_cert is nothing without tls_key"),
        ({"tls_key": "a.pem"}, "tls_key is nothing without tls_cert"),
        ({"tls_client_ca": "a.pem"}, "set tls_cert and tls_key too"),
        ({"port": 7071}, "port and http_port are both 7071"),
        ({"advertise": "mq.local"}, "write host:port"),
        ({"advertise": "postroom://mq.local:7070"}, "write host:port"),
        ({"advertise": "mq:0"}, "write host:port"),
        ({"max_frame_bytes": 8 << 20}, "make it 9 MB at least"),
        ({"answers_bytes": 32 << 20}, "make it four times max_answer at least"),
        ({"zone": "z" * 61}, "60 printable characters"),
    ],
)
def test_what_does_not_go_together(options: dict[str, Any], says: str) -> None:
    assert re.match(r"--[a-z-]+( and --[a-z-]+)?: ", refused(says, options))
    with pytest.raises(InvalidSetting, match=re.escape(says)):
        ServeSettings(**options)


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ({"grace_ms": "soon"}, "--grace must be a duration"),
        ({"log_level": "loud"}, "--log-level takes one of debug, info, warning, error; not 'loud'"),
        ({"http_port": 99999}, "--http-port takes a port"),
        ({"max_connections": -1}, "--max-connections takes a whole number"),
    ],
)
def test_what_an_option_may_not_say(option: dict[str, Any], says: str) -> None:
    refused(says, option)


def test_where_a_contradiction_comes_from(toml: Any) -> None:
    path = toml('host = "0.0.0.0"')
    said = refused("dev lets everybody in", env={"POSTROOM_SERVE_DEV": "1"}, config=path)
    assert said.startswith(f"POSTROOM_SERVE_DEV and {path}: ")


def test_what_goes_together() -> None:
    ServeSettings(dev=True, host="localhost", http_host="::1")
    ServeSettings(tls_cert="a", tls_key="b", tls_client_ca="c", host="0.0.0.0")
    ServeSettings(port=0, http_port=0)
    ServeSettings(advertise="[::1]:7070", max_frame_bytes=9 << 20)


# ---- what follows ----


@pytest.mark.parametrize(
    ("host", "yes"),
    [
        *(
            (host, True)
            for host in ("127.0.0.1", "127.8.8.8", "localhost", "::1", "[::1]", "::ffff:127.0.0.1")
        ),
        *(
            (host, False)
            for host in ("0.0.0.0", "::", "", "10.0.0.1", "localhost.evil.org", "::ffff:10.0.0.1")
        ),
    ],
)
def test_what_is_this_machine(host: str, yes: bool) -> None:
    assert is_loopback(host) == yes


def test_tokens_in_the_clear_are_noticed() -> None:
    assert ServeSettings(host="0.0.0.0").exposed
    assert not ServeSettings(host="0.0.0.0", tls_cert="a", tls_key="b").exposed


def test_no_password_is_shown(toml: Any) -> None:
    secret = "hunter2"
    url = f"postgresql://ann:{secret}@host/q"
    shown = repr(ServeSettings(url=url, shards={"b": url}))
    path = toml(f'url = "{url}"\ndev = true\nhost = "mq"\n[shards]\nb = "{url}"\n')
    shown += refused("dev lets", config=path)
    shown += refused("takes addresses by name", config=toml(f'[shards]\nb = ["{url}"]'))
    shown += refused("takes text in quotes", config=toml(f'url = ["{url}"]'))
    shown += refused("dev lets", {"dev": True, "host": "mq", "url": url}, {"POSTROOM_URL": url})
    assert secret not in shown
