"""`/docs`: every call of the API with its fields, on one page made from `openapi.json`.

Plain HTML: no script, nothing from another host, no place to type a token into. Everything that comes from
the description is escaped. Made once, when it is first asked for.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from html import escape
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

__all__ = ["page", "router"]

router = APIRouter(include_in_schema=False)

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid #ccc; text-transform: capitalize; }
h3 { margin-bottom: .2rem; font: bold 1rem/1.5 ui-monospace, monospace; }
h3 b { display: inline-block; min-width: 4.5rem; color: #06c; }
table { border-collapse: collapse; width: 100%; margin: .5rem 0; }
td, th { text-align: left; vertical-align: top; padding: .15rem .8rem .15rem 0; border-bottom: 1px solid; }
td, th { border-color: #eee; }
code, td:first-child { font-family: ui-monospace, monospace; }
@media (prefers-color-scheme: dark) { body { background: #111; color: #ddd; } h3 b { color: #6bf; }
  td, th { border-color: #333; } a { color: #6bf; } }
"""
_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_POLICY = (
    f"default-src 'none'; style-src 'sha256-{_HASH}'; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'none'"
)
_ABOUT = (
    "<p>Send <code>Authorization: Bearer pst_…</code> with every call below <code>/api/v1</code>; with "
    "<code>--dev</code> none is needed on this machine. The same as JSON, for tools: "
    "<a href='openapi.json'>openapi.json</a>.</p>"
)


@router.get("/docs")
async def docs(request: Request) -> HTMLResponse:
    state = request.app.state
    if not hasattr(state, "reference"):
        state.reference = page(request.app.openapi())
    return HTMLResponse(state.reference, headers={"Content-Security-Policy": _POLICY})


def page(described: dict[str, Any]) -> str:
    """The page for a description."""
    title = escape(described["info"]["title"])
    parts = "".join(_part(tag, calls, described) for tag, calls in _by_tag(described).items())
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{title}: HTTP</title>"
        f"<meta name='viewport' content='width=device-width'><style>{_STYLE}</style></head><body>"
        f"<h1>{title}</h1><p>{_text(described['info'].get('description', ''))}</p>{_ABOUT}{parts}"
        "</body></html>"
    )


def _by_tag(described: dict[str, Any]) -> dict[str, list[tuple[str, str, dict[str, Any]]]]:
    found: dict[str, list[tuple[str, str, dict[str, Any]]]] = {}
    for path, calls in described["paths"].items():
        for method, call in calls.items():
            found.setdefault((call.get("tags") or ["other"])[0], []).append((method, path, call))
    return found


def _part(tag: str, calls: list[tuple[str, str, dict[str, Any]]], described: dict[str, Any]) -> str:
    return f"<h2>{escape(tag)}</h2>" + "".join(_call(*call, described) for call in calls)


def _call(method: str, path: str, call: dict[str, Any], described: dict[str, Any]) -> str:
    said = call.get("description") or call.get("summary", "")
    rows = [_row(one["name"], one["schema"], one.get("required", False), one["in"]) for one in _given(call)]
    for body in call.get("requestBody", {}).get("content", {}).values():
        rows += _fields(body["schema"], described)
    for body in (one for status, one in call.get("responses", {}).items() if status.startswith("2")):
        for content in body.get("content", {}).values():
            rows += [_row("answer", content.get("schema", {}), True, "")]
    table = f"<table>{''.join(rows)}</table>" if rows else ""
    return f"<h3><b>{escape(method.upper())}</b> {escape(path)}</h3><p>{_text(said)}</p>{table}"


def _given(call: dict[str, Any]) -> list[dict[str, Any]]:
    return list(call.get("parameters", ()))


def _fields(schema: dict[str, Any], described: dict[str, Any], within: str = "") -> Iterator[str]:
    """The fields of a body, and below a list or an object those of its own."""
    schema = _resolved(schema, described)
    required = schema.get("required", ())
    for name, one in schema.get("properties", {}).items():
        yield _row(f"{within}{name}", one, name in required, "body")
        inner = _resolved(one.get("items", {}), described)
        if inner.get("properties") and within.count(".") < 2:
            yield from _fields(inner, described, f"{within}{name}[].")


def _resolved(schema: dict[str, Any], described: dict[str, Any]) -> dict[str, Any]:
    name = str(schema.get("$ref", "")).rpartition("/")[2]
    return described["components"]["schemas"].get(name, schema) if name else schema


def _row(name: str, schema: dict[str, Any], required: bool, where: str) -> str:
    needed = (
        ""
        if not where
        else "required"
        if required
        else f"default {schema['default']}"
        if "default" in schema
        else ""
    )
    cells = (name, where, _kind(schema), needed, schema.get("description", ""))
    return f"<tr>{''.join(f'<td>{_text(str(cell))}</td>' for cell in cells)}</tr>"


def _kind(schema: dict[str, Any]) -> str:
    """What may stand there, in a word or some."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    for several in ("anyOf", "oneOf", "allOf"):
        if several in schema:
            return " or ".join(dict.fromkeys(_kind(one) for one in schema[several]))
    if "enum" in schema:
        return " or ".join(map(str, schema["enum"]))
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    return str(schema.get("type", schema.get("const", "anything")))


def _text(text: str) -> str:
    return escape(text).replace("\n\n", "<br>")
