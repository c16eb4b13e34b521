"""What programs can import and call, as text: one line for a name, a member, a field.

Says nothing of where inside the package something lives: types are shown by their names alone, and what a
class inherits from others of the package counts as its own. What a public call returns is followed, so the
methods of a class that nobody imports by name are pinned too.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from importlib.util import resolve_name
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from postroom.errors import PostroomError

__all__ = ["PUBLIC", "documented_imports", "pinned_names", "public_names_text"]

# All that the module exports, or those of its names that the documentation uses.
PUBLIC: dict[str, tuple[str, ...] | None] = {
    "postroom": None,
    "postroom.clock": ("Clock", "ManualClock", "SystemClock"),
    "postroom.errors": None,
    "postroom.integrations.celery": None,
    "postroom.integrations.django": None,
    "postroom.integrations.fastapi": None,
    "postroom.integrations.flask": None,
    "postroom.integrations.logging": None,
    "postroom.integrations.process": None,
    "postroom.metrics": ("CONTENT_TYPE", "Family", "Metrics", "Sample"),
    "postroom.model.access": ("Principal", "allows", "parse_permissions"),
    "postroom.model.split_plan_file": ("plan_from_text", "plan_to_text"),
    "postroom.spark": None,
    "postroom.spark.jobs.archive": ("ArchiveOptions", "archive", "compact"),
    "postroom.spark.jobs.audit": ("AuditOptions", "audit"),
    "postroom.spark.jobs.backlog": ("BacklogOptions", "backlog"),
    "postroom.spark.jobs.fields": ("Journal",),
    "postroom.spark.jobs.hotspots": ("HotspotsOptions", "hotspots"),
    "postroom.spark.jobs.lake": ("open_lake",),
    "postroom.spark.jobs.replay": ("ReplayOptions", "replay"),
    "postroom.spark.jobs.triage": ("TriageOptions", "triage"),
    "postroom.spark.source": ("PostroomSource",),
    "postroom.store": ("open_memory", "open_server", "open_sqlite", "open_store"),
    "postroom.store.contract": None,
    "postroom.sync": None,
    "postroom.testing": None,
    "postroom.testing.check": None,
    "postroom.testing.plugin": None,
    "postroom.testing.store_contract": None,
    "postroom.tls": ("client_context",),
    "postroom.tracing": None,
    "pyspark_postroom": None,
}
# Started by name: by a shell, Spark, Django, pytest.
_STARTED = (
    "postroom.__main__",
    "postroom.cli:main",
    "postroom.integrations.django.apps:PostroomConfig",
    "postroom.integrations.django.management.commands.postroom_worker:Command",
    "postroom.spark.jar.__main__",
)

# What these return is named in their own modules, or is the business of whoever writes a store or a source.
_NOT_FOLLOWED = (
    "postroom.model.access",
    "postroom.spark.source",
    "postroom.store",
    "postroom.store.contract",
    "postroom.testing.store_contract",
    "pyspark_postroom",
)
# Made by a connection: how is its own business.
_NOT_CONSTRUCTED = frozenset(
    {
        "Connection",
        "Consumer",
        "Producer",
        "Received",
        "Relay",
        "Segment",
        "Served",
        "SpooledProducer",
        "Staging",
        "Task",
    }
)

# Not for programs: classes behind what they call.
_INNER_CLASSES = frozenset(
    {"Answering", "Broker", "Cadence", "Handler", "Reach", "ReadOptions", "Start", "LanePolicy"}
)

_PROTOCOL = frozenset(
    {
        "__init__",
        "__call__",
        "__await__",
        "__enter__",
        "__exit__",
        "__aenter__",
        "__aexit__",
        "__iter__",
        "__next__",
        "__aiter__",
        "__anext__",
        "__len__",
        "__getitem__",
        "__contains__",
        "__bool__",
    }
)
_NO_BASES = frozenset({"object", "Protocol", "Generic", "Struct", "_StructMixin", "BaseException"})
_MODULES = re.compile(r"\b(?:[a-z_][a-z0-9_]*\.)+(?=[A-Za-z_])")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_FORWARD = re.compile(r"ForwardRef\('([^']*)'\)")
_WORD = re.compile(r"[A-Za-z_]\w*")
_IMPORT = re.compile(r"^\s*(?:>>> )?from (postroom[\w.]*) import (?:\(([^)]*)\)|([^\n#]+))", re.MULTILINE)
_PLAIN_IMPORT = re.compile(r"^\s*(?:>>> )?import (postroom[\w.]*)", re.MULTILINE)


def pinned_names(module: str) -> list[str]:
    return sorted(PUBLIC[module] or import_module(module).__all__)


def documented_imports(text: str) -> Iterator[tuple[str, str]]:
    """Module and name of each import in a page; the name of a plain import is empty."""
    for module, bracketed, plain in _IMPORT.findall(text):
        for one in (bracketed or plain).split(","):
            if name := one.split(" as ")[0].strip().split(" ")[0]:
                yield module, name
    yield from ((module, "") for module in _PLAIN_IMPORT.findall(text))


def public_names_text() -> str:
    reached: dict[str, type] = {}
    lines: list[str] = []
    shown: set[int] = set()
    for module in PUBLIC:
        lines += ["", f"== {module}"]
        for name in pinned_names(module):
            value = getattr(import_module(module), name)
            if isinstance(value, type) and id(value) in shown:
                lines.append(f"{name}: see above")
                continue
            shown.add(id(value))
            lines += _of_value(name, value, {} if module in _NOT_FOLLOWED else reached)
    lines += ["", "== started by name", *(_started(one) for one in _STARTED)]
    lines += ["", "== reached by calls and fields of the above, whatever module they are in"]
    lines += _reached(reached, shown)
    return "\n".join(lines).lstrip("\n") + "\n"


def _reached(reached: dict[str, type], shown: set[int]) -> list[str]:
    found: list[list[str]] = []
    while waiting := [kind for kind in reached.values() if id(kind) not in shown]:
        for kind in waiting:
            shown.add(id(kind))
            found.append(list(_of_class(kind.__name__.lstrip("_"), kind, reached)))
    return [line for lines in sorted(found) for line in lines]


def _started(where: str) -> str:
    module, _, name = where.partition(":")
    if name:
        getattr(import_module(module), name)
    else:
        assert (Path(import_module("postroom").__path__[0]) / f"{module.replace('.', '/')[9:]}.py").is_file()
    return where


# ---- one name ----


def _of_value(name: str, value: Any, reached: dict[str, type]) -> Iterator[str]:
    if isinstance(value, type):
        yield from _of_class(name, value, reached)
    elif isinstance(value, ModuleType):
        yield f"{name}: module"
        if value.__name__ not in PUBLIC:
            for one in sorted(value.__all__):
                yield from ("    " + line for line in _of_value(one, getattr(value, one), reached))
    elif callable(value) and hasattr(value, "__name__"):
        yield from _of_function(name, value, reached)
    else:
        yield f"{name} = {_value(value)}"


def _of_function(name: str, function: Any, reached: dict[str, type]) -> Iterator[str]:
    plain = inspect.unwrap(function) if isinstance(function, FunctionType) else function
    asynchronous = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        yield f"{name}: {type(function).__name__}"
        return
    _reach(signature.return_annotation, plain, reached)
    yield f"{'async ' if asynchronous else ''}{name}{_signature(signature)}"


def _signature(signature: inspect.Signature) -> str:
    shown = []
    last = None
    for one in signature.parameters.values():
        if one.kind is one.KEYWORD_ONLY and last not in (one.KEYWORD_ONLY, one.VAR_POSITIONAL):
            shown.append("*")
        if last is one.POSITIONAL_ONLY and one.kind is not one.POSITIONAL_ONLY:
            shown.append("/")
        stars = "*" if one.kind is one.VAR_POSITIONAL else "**" if one.kind is one.VAR_KEYWORD else ""
        text = f"{stars}{one.name}{_annotation(one.annotation, ': ')}"
        shown.append(text if one.default is one.empty else f"{text} = {_value(one.default)}")
        last = one.kind
    if last is inspect.Parameter.POSITIONAL_ONLY:
        shown.append("/")
    return f"({', '.join(shown)}){_annotation(signature.return_annotation, ' -> ')}"


def _annotation(annotation: Any, before: str) -> str:
    if annotation is inspect.Signature.empty:
        return ""
    is_class = isinstance(annotation, type) and not hasattr(annotation, "__args__")
    return before + _short(annotation.__name__ if is_class else str(annotation))


def _value(value: Any) -> str:
    return repr(value) if isinstance(value, str) else _short(repr(value))


def _short(text: str) -> str:
    """Without modules, addresses and the marks of forward references."""
    return _FORWARD.sub(r"\1", _ADDRESS.sub("", _MODULES.sub("", text)))


# ---- a class ----


def _of_class(name: str, kind: type, reached: dict[str, type]) -> Iterator[str]:
    bases = ", ".join(_bases(kind))
    shown = f"class {name}{f'({bases})' if bases else ''}"
    if issubclass(kind, PostroomError):
        shown += f" code={kind.code!r} retriable={kind.retriable}"
    yield shown
    if issubclass(kind, enum.Enum):
        yield from (f"    {one.name} = {one.value!r}" for one in kind)
    members = dict(_members(name, kind, reached))
    if issubclass(kind, PostroomError) and kind is not PostroomError:
        inherited = dict(_members(name, PostroomError, reached))
        members = {one: lines for one, lines in members.items() if inherited.get(one) != lines}
    for one in sorted(members):
        yield from ("    " + line for line in members[one])


def _bases(kind: type) -> Iterator[str]:
    """Those that programs can see: errors, and classes from outside the package."""
    for base in kind.__mro__[1:]:
        if base.__module__.startswith("postroom"):
            if issubclass(base, PostroomError):
                yield base.__name__
        elif base.__name__ not in _NO_BASES:
            yield base.__name__


def _members(name: str, kind: type, reached: dict[str, type]) -> Iterator[tuple[str, list[str]]]:
    own = [base for base in reversed(kind.__mro__) if base.__module__.startswith("postroom")]
    made = dataclasses.is_dataclass(kind) or hasattr(kind, "__struct_fields__") or hasattr(kind, "_fields")
    skipped = made or name in _NOT_CONSTRUCTED or getattr(kind, "_is_protocol", False)
    for base in own:
        for one, annotation in vars(base).get("__annotations__", {}).items():
            if not one.startswith("_"):
                _reach(annotation, base, reached)
                yield one, [f"{one}: {_short(str(annotation))}"]
        for one in _assigned(base):
            yield one, [f"{one}: set by the object"]
    if made:
        yield "__init__", [f"__init__{_signature(inspect.signature(kind))}"]
    for one in {one for base in own for one in vars(base)}:
        if one.startswith("_") and (one not in _PROTOCOL or (one == "__init__" and skipped)):
            continue
        member = inspect.getattr_static(kind, one)
        if issubclass(kind, enum.Enum) and isinstance(member, kind):
            continue
        if issubclass(kind, PostroomError) and one in ("code", "retriable"):
            continue
        if one.startswith("test_"):  # tests are the promises of the store's suite: they grow
            continue
        if shown := list(_of_member(one, member, reached)):
            yield one, shown


def _of_member(name: str, member: Any, reached: dict[str, type]) -> Iterator[str]:
    if isinstance(member, staticmethod | classmethod):
        for line in _of_function(name, member.__func__, reached):
            yield f"{type(member).__name__} {line}"
    elif isinstance(member, property):
        annotation = getattr(member.fget, "__annotations__", {}).get("return", inspect.Signature.empty)
        _reach(annotation, member.fget, reached)
        yield f"{name}{_annotation(annotation, ': ')} (property{', settable' if member.fset else ''})"
    elif inspect.isfunction(member):
        yield from _of_function(name, member, reached)
    elif isinstance(member, str | int | float | tuple | frozenset | None):
        yield f"{name} = {_value(member)}"


@functools.cache
def _tree(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(import_module(module)))


@functools.cache
def _assigned(kind: type) -> set[str]:
    """What methods assign to `self`."""
    classes = (node for node in _tree(kind.__module__).body if isinstance(node, ast.ClassDef))
    own = (node for found in classes if found.name == kind.__name__ for node in ast.walk(found))
    targets = (node for node in own if isinstance(node, ast.Attribute))
    return {
        node.attr
        for node in targets
        if isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
        and not node.attr.startswith("_")
    }


@functools.cache
def _names_in(module: str) -> dict[str, Any]:
    """What a module knows by name, and what it imports for annotations alone."""
    found = import_module(module)
    names = dict(vars(found))
    for node in _tree(module).body:
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for line in ast.walk(node):
                if isinstance(line, ast.ImportFrom):
                    there = resolve_name("." * line.level + (line.module or ""), found.__package__ or "")
                    source = vars(import_module(there))
                    names |= {one.asname or one.name: source.get(one.name) for one in line.names}
    return names


def _reach(annotation: Any, where: Any, reached: dict[str, type]) -> None:
    """Note the classes of the package that an annotation names."""
    space = _names_in(where.__module__)
    for word in _WORD.findall(annotation if isinstance(annotation, str) else str(annotation)):
        found = space.get(word)
        if isinstance(found, type) and found.__module__.startswith("postroom") and word not in _INNER_CLASSES:
            reached[f"{found.__module__}.{found.__name__}"] = found
