"""The shape of the code, checked: imports go downwards and in no circle, rooms stay small, exports exist.

Works on the source text alone, so that it needs no optional package and sees imports inside functions
and under `TYPE_CHECKING` as well. Every rule has a test that feeds it a tree which breaks it.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import postroom
from postroom import errors
from tests.pins.public_names import PUBLIC

SOURCE = Path(__file__).resolve().parents[3] / "src"
TESTS = SOURCE.parent / "tests"

MAX_MODULE_LINES = 600
MAX_FUNCTION_LINES = 70
MIN_MODULE_LINES = 40
MAX_FOLDER_MODULES = 12
MAX_FOLDER_TESTS = 16

# A module this short is a name that somebody else looks for, or a program's start.
SHORT = frozenset(
    {
        "postroom.__main__",  # python -m postroom
        "postroom.spark.jar.__main__",
        "postroom.backoff",  # every room takes its pauses from it
        "postroom.model.frozen",  # a decorator
        "postroom.tracing",  # public
        "postroom.integrations.celery.results",  # Celery finds it by its entry point
        "postroom.integrations.django.apps",  # Django finds these by their names
        "postroom.integrations.django.management.commands.postroom_worker",
    }
)

# Two modules of one layer with the same name: each stands for the same part of two rooms.
SAME_STEM = frozenset(
    {
        ("client", "fetch"),  # of a consumer, and of one whose group is ordered
    }
)

# Modules that one other module alone imports. It may only fall: merge what is shallow into its importer.
MAX_SINGLE_IMPORTERS = 28

# They put a whole together, and name each of its parts once: that a part is named nowhere else is the point.
COMPOSITION_ROOTS = frozenset(
    {
        "postroom.broker.broker",  # an embedded queue
        "postroom.store",  # a store of a dialect
        "postroom.http.app",  # what is served over HTTP
        "postroom.console.pages",  # what an app with a console has more
        "postroom.cli.operate.serve",  # a broker's process
        "postroom.integrations.celery.transport",  # a broker of kombu's
        "postroom.kafka.server",  # a listener for Kafka clients
        "postroom.kafka.session",  # what these can ask
    }
)

BASE = "errors clock config units address files tasks backoff serve_settings tls metrics"
# Lowest first. A module may import its own layer and those before it.
LAYERS = (
    tuple(BASE.split()),
    ("model",),
    ("store",),
    ("endpoint",),
    ("broker",),
    ("wire",),
    ("kafka",),
    ("client", "sync", "tracing", "types", ""),  # "" is postroom/__init__.py
    ("testing",),
    ("integrations",),
    ("http",),
    ("console",),
    ("spark",),
    ("cli", "__main__"),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

# Decisions take time and randomness as arguments and do no I/O.
IMPURE = frozenset({"time", "random", "os", "socket", "asyncio", "threading", "sqlite3"})

CODEC = "aiokafka"
CODEC_HOME = "postroom.model.messages.batch"


# --- reading a tree of source ------------------------------------------------------------------------


@dataclass(frozen=True)
class Module:
    name: str
    path: Path
    tree: ast.Module
    lines: int

    @property
    def package(self) -> str:
        """What a relative import starts from."""
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]

    @property
    def part(self) -> str:
        """The name directly under `postroom` that decides the layer."""
        return part_of(self.name)


def part_of(module_name: str) -> str:
    return module_name.partition(".")[2].partition(".")[0]


def load(source: Path) -> dict[str, Module]:
    modules = {}
    for path in sorted((source / "postroom").rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text(encoding="utf-8")
        modules[name] = Module(name, path, ast.parse(text, str(path)), len(text.splitlines()))
    return modules


def imports(module: Module, known: dict[str, Module]) -> Iterator[tuple[int, str]]:
    """Line and absolute name of everything `module` imports, wherever the statement stands."""
    for node in ast.walk(module.tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(names=names):
                base = absolute(module, node)
                for alias in names:
                    member = f"{base}.{alias.name}"
                    is_module = member in known or (base == "postroom" and alias.name in RANK)
                    yield node.lineno, member if is_module else base
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield node.lineno, name


def absolute(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.package.split(".")
    base = parts[: len(parts) - (node.level - 1)]
    return ".".join([*base, node.module] if node.module else base)


# --- the rules: each returns what breaks it, one sentence a piece ----------------------------------------


def upward_imports(modules: dict[str, Module]) -> list[str]:
    found = []
    for module in modules.values():
        if module.part not in RANK:
            found.append(f"{module.name} has no layer: give {module.part!r} a place in LAYERS")
            continue
        for line, target in imports(module, modules):
            if target.partition(".")[0] != "postroom":
                continue
            # A target without a layer counts as the top, so nothing below may lean on it.
            if RANK.get(part_of(target), len(LAYERS)) > RANK[module.part]:
                found.append(f"{module.name}:{line} imports {target}, which is above it")
    return found


def impure_models(modules: dict[str, Module]) -> list[str]:
    return [
        f"{module.name}:{line} imports {target}; pass it in as an argument"
        for module in modules.values()
        if module.part == "model"
        for line, target in imports(module, modules)
        if target.partition(".")[0] in IMPURE
    ]


def codec_importers(modules: dict[str, Module]) -> set[str]:
    return {
        module.name
        for module in modules.values()
        for _, target in imports(module, modules)
        if target.partition(".")[0] == CODEC
    }


def too_long(modules: dict[str, Module]) -> list[str]:
    found = []
    for module in modules.values():
        if module.lines > MAX_MODULE_LINES:
            found.append(f"{module.name} has {module.lines} lines; the limit is {MAX_MODULE_LINES}")
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    found.append(
                        f"{module.name}:{node.lineno} {node.name}() has {lines} lines; "
                        f"the limit is {MAX_FUNCTION_LINES}"
                    )
    return found


def folder_of(module: Module) -> str:
    return module.name.rpartition(".")[0]


def crowded_folders(modules: dict[str, Module]) -> list[str]:
    sizes = Counter(folder_of(module) for module in modules.values() if module.path.name != "__init__.py")
    return [
        f"{folder} has {count} modules; the limit is {MAX_FOLDER_MODULES}: find the room that hides in it"
        for folder, count in sorted(sizes.items())
        if count > MAX_FOLDER_MODULES
    ]


def too_short(modules: dict[str, Module]) -> list[str]:
    return [
        f"{module.name} has {module.lines} lines; a module has {MIN_MODULE_LINES} or more, "
        "or belongs to the one that uses it"
        for module in modules.values()
        if module.lines < MIN_MODULE_LINES and module.path.name != "__init__.py" and module.name not in SHORT
    ]


def repeated_stems(modules: dict[str, Module]) -> list[str]:
    found = defaultdict(list)
    for module in modules.values():
        stem = module.path.stem
        if module.part and not stem.startswith("__"):
            found[module.part, stem].append(module.name)
    return [
        f"{' and '.join(sorted(names))} have one name in one layer: say what tells them apart"
        for key, names in sorted(found.items())
        if len(names) > 1 and key not in SAME_STEM
    ]


def single_importers(
    modules: dict[str, Module], roots: frozenset[str] = frozenset(), public: Collection[str] = ()
) -> list[str]:
    """Modules with one importer, outside the command line (a command is one file) and the contract suite.

    Without those that one of the `roots` wires, and those that users import: nobody reads a way through them.
    """
    importers = defaultdict(set)
    for module in modules.values():
        for _, target in imports(module, modules):
            if target != module.name:
                importers[target].add(module.name)
    return [
        f"{module.name} is imported by {min(importers[module.name])} alone"
        for module in modules.values()
        if len(importers[module.name]) == 1
        and module.path.name != "__init__.py"
        and module.part != "cli"
        and ".store_contract" not in module.name
        and module.name not in public
        and not importers[module.name] & roots
    ]


def import_cycle(modules: dict[str, Module]) -> list[str]:
    """One circle of modules that need each other while they are imported; empty if there is none."""
    graph = {
        module.name: {name for name in needed_at_import(module, modules) if name in modules}
        for module in modules.values()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def needed_at_import(module: Module, known: dict[str, Module]) -> Iterator[str]:
    """What is imported when the module runs: not in functions, not for type checkers."""
    runs = ast.Module([], [])
    waiting: list[ast.stmt] = list(module.tree.body)
    while waiting:
        match waiting.pop():
            case ast.Import() | ast.ImportFrom() as statement:
                runs.body.append(statement)
            case ast.If(test=test) if "TYPE_CHECKING" in ast.unparse(test):
                pass
            case ast.If() | ast.Try() | ast.With() | ast.ClassDef() as block:
                waiting += [node for node in ast.iter_child_nodes(block) if isinstance(node, ast.stmt)]
    top = Module(module.name, module.path, runs, module.lines)
    yield from (target for _, target in imports(top, known) if target != module.name)


def missing_exports(modules: dict[str, Module]) -> list[str]:
    found = []
    for module in modules.values():
        exported, defined = exports(module), top_level_names(module)
        if "__getattr__" in defined:
            continue  # resolves names when asked; only importing it can tell
        for name in exported:
            if name not in defined and f"{module.name}.{name}" not in modules:
                found.append(f"{module.name}.__all__ names {name!r}, which it does not define")
    return found


def exports(module: Module) -> list[str]:
    for node in module.tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                return list(ast.literal_eval(value))
            case ast.AnnAssign(target=ast.Name(id="__all__"), value=ast.expr() as value):
                return list(ast.literal_eval(value))
    return []


def top_level_names(module: Module) -> set[str]:
    """Names bound when the module runs; bodies of functions and classes do not count."""
    names: set[str] = set()
    waiting: list[ast.AST] = list(module.tree.body)
    while waiting:
        node = waiting.pop()
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Import(names=aliases):
                names.update(alias.asname or alias.name.partition(".")[0] for alias in aliases)
            case ast.ImportFrom(names=aliases):
                names.update(alias.asname or alias.name for alias in aliases)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case _:
                waiting.extend(ast.iter_child_nodes(node))
    return names


def undrawn_errors(module: Module) -> list[str]:
    """Classes the docstring's tree does not show, and names in the tree that are no class."""
    doc = ast.get_docstring(module.tree) or ""
    classes = {node.name for node in module.tree.body if isinstance(node, ast.ClassDef)}
    mentioned = set(re.findall(r"\w+", doc))
    drawn = {
        name
        for line in re.findall(r"^[│ ]*[├└]── (\w+(?:, \w+)*)", doc, re.MULTILINE)
        for name in line.split(", ")
    }
    return [f"{name} is not in the tree" for name in sorted(classes - mentioned)] + [
        f"{name} is in the tree but not in the module" for name in sorted(drawn - classes)
    ]


# --- Postroom keeps them -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def modules() -> dict[str, Module]:
    return load(SOURCE)


@pytest.mark.slow("make check runs it")
def test_imports_go_downwards_only(modules: dict[str, Module]) -> None:
    assert upward_imports(modules) == []


def test_the_model_has_no_clock_no_randomness_and_no_io(modules: dict[str, Module]) -> None:
    assert impure_models(modules) == []


def test_the_codec_is_imported_in_one_module(modules: dict[str, Module]) -> None:
    assert codec_importers(modules) == ({CODEC_HOME} & modules.keys())


def test_nothing_is_too_long(modules: dict[str, Module]) -> None:
    assert too_long(modules) == []


def test_a_folder_is_a_room(modules: dict[str, Module]) -> None:
    assert crowded_folders(modules) == []


def test_unit_tests_are_in_folders_like_the_rooms() -> None:
    folders = {path.parent.relative_to(TESTS / "unit") for path in (TESTS / "unit").rglob("test_*.py")}
    rooms = {path for path in folders if (SOURCE / "postroom" / path).is_dir()}
    assert {str(path) for path in folders - rooms} == {
        "bench",
        "repository",
    }  # of this repository, not of `src`


def test_a_folder_of_tests_is_not_crowded() -> None:
    crowds = Counter(str(path.parent.relative_to(TESTS)) for path in TESTS.rglob("test_*.py"))
    found = [
        f"tests/{folder} has {count} modules" for folder, count in crowds.items() if count > MAX_FOLDER_TESTS
    ]
    assert found == [], f"the limit is {MAX_FOLDER_TESTS}: find the room that hides in it"


def test_a_module_is_worth_its_file(modules: dict[str, Module]) -> None:
    assert too_short(modules) == []


def test_a_name_stands_for_one_module_of_a_layer(modules: dict[str, Module]) -> None:
    assert repeated_stems(modules) == []


def test_few_modules_have_one_importer(modules: dict[str, Module]) -> None:
    found = single_importers(modules, COMPOSITION_ROOTS, PUBLIC)
    assert len(found) <= MAX_SINGLE_IMPORTERS, "\n".join(found)


def test_no_modules_import_each_other(modules: dict[str, Module]) -> None:
    assert import_cycle(modules) == []


def test_every_exported_name_exists(modules: dict[str, Module]) -> None:
    assert missing_exports(modules) == []


def test_the_public_names_exist_and_are_sorted() -> None:
    def order(name: str) -> tuple[int, str]:  # the order `ruff --fix` gives: CONSTANTS, Classes, functions
        return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)

    public = postroom.__all__
    assert [name for name in public if not hasattr(postroom, name)] == []
    assert list(public) == sorted(set(public), key=order)


def test_the_error_tree_is_drawn_in_full(modules: dict[str, Module]) -> None:
    assert undrawn_errors(modules["postroom.errors"]) == []


def test_every_error_is_exported_and_has_a_code_of_its_own(modules: dict[str, Module]) -> None:
    classes = [node.name for node in modules["postroom.errors"].tree.body if isinstance(node, ast.ClassDef)]
    assert set(classes) <= set(errors.__all__)
    codes = [getattr(errors, name).code for name in classes]
    assert len(codes) == len(set(codes))


# --- the rules themselves notice ---------------------------------------------------------------------


def tree(root: Path, files: dict[str, str]) -> dict[str, Module]:
    """A fake source tree: `{"model/batch": text}`; the packages around it are added."""
    for name, text in {"__init__": "", **files}.items():
        path = root / "postroom" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(textwrap.dedent(text), encoding="utf-8")
    return load(root)


@pytest.mark.parametrize(
    "statement",
    [
        "import postroom.store.contract",
        "import postroom",
        "from postroom import store",
        "from postroom import connect",
        "from postroom.store import contract",
        "from postroom.store.contract import Store",
        "from ..store import contract",
        "from .. import store",
        "from ..store.contract import Store as S",
        "def late():\n    from postroom.store import contract",
        "if TYPE_CHECKING:\n    from postroom.store import contract",
        "try:\n    import postroom.wire\nexcept ImportError: pass",
        "importlib.import_module('postroom.store')",
        "from postroom.unheard_of import thing",
    ],
)
def test_an_upward_import_is_found(tmp_path: Path, statement: str) -> None:
    modules = tree(tmp_path, {"model/route": statement, "store/contract": ""})
    (found,) = upward_imports(modules)
    assert found.startswith("postroom.model.route:") and found.endswith("which is above it")


@pytest.mark.parametrize(
    ("importer", "statement"),
    [
        ("store/sql", "from ..model import route"),
        ("store/sql", "from ..model.route import Route"),
        ("store/sql", "from . import dialect"),
        ("store/sql", "from postroom import errors, model"),
        ("store/sql", "from .. import errors"),
        ("store/sql", "import sqlite3, asyncio"),
        ("config", "from .units import seconds"),
        ("sync", "from .client import connect"),
        ("__init__", "from .client import connect\nfrom .errors import PostroomError"),
        ("client/app", "import postroom"),
        ("cli/__init__", "from ..http import app\nfrom ..spark import jobs"),
        ("__main__", "from postroom.cli import main"),
    ],
)
def test_a_downward_import_is_fine(tmp_path: Path, importer: str, statement: str) -> None:
    assert upward_imports(tree(tmp_path, {importer: statement})) == []


def test_a_relative_import_in_a_package_file_starts_at_the_package(tmp_path: Path) -> None:
    modules = tree(tmp_path, {"model/__init__": "from .batch import Batch\nfrom ..broker import Broker"})
    assert upward_imports(modules) == ["postroom.model:2 imports postroom.broker, which is above it"]


def test_a_module_without_a_layer_is_found(tmp_path: Path) -> None:
    assert "give 'helpers' a place" in upward_imports(tree(tmp_path, {"helpers": ""}))[0]


@pytest.mark.parametrize("name", sorted(IMPURE))
def test_an_impure_model_is_found(tmp_path: Path, name: str) -> None:
    top = tree(tmp_path / "a", {"model/retry": f"import {name}", "store/sql": f"import {name}"})
    inner = tree(tmp_path / "b", {"model/retry": f"def f():\n    from {name} import x"})
    assert impure_models(top) == [f"postroom.model.retry:1 imports {name}; pass it in as an argument"]
    assert len(impure_models(inner)) == 1


def test_a_second_codec_importer_is_found(tmp_path: Path) -> None:
    modules = tree(
        tmp_path,
        {
            "model/messages/batch": "from aiokafka.record import util",
            "broker/writer": "import aiokafka.record",
        },
    )
    assert codec_importers(modules) == {CODEC_HOME, "postroom.broker.writer"}


def test_long_code_is_found(tmp_path: Path) -> None:
    def files(extra: int) -> dict[str, str]:
        body = "    pass\n" * (MAX_FUNCTION_LINES - 1 + extra)
        return {"clock": f"async def f():\n{body}", "config": "x = 1\n" * (MAX_MODULE_LINES + extra)}

    fits, over = tree(tmp_path / "a", files(0)), tree(tmp_path / "b", files(1))
    assert too_long(fits) == []
    assert [sentence.split()[0] for sentence in too_long(over)] == ["postroom.clock:1", "postroom.config"]


def test_a_crowded_folder_is_found(tmp_path: Path) -> None:
    files = {f"model/m{n}": "" for n in range(MAX_FOLDER_MODULES)}
    fits, over = tree(tmp_path / "a", files), tree(tmp_path / "b", files | {"model/one_more": ""})
    assert crowded_folders(fits) == []
    assert [sentence.split()[0] for sentence in crowded_folders(over)] == ["postroom.model"]


def test_a_short_module_is_found(tmp_path: Path) -> None:
    text = "x = 1\n" * MIN_MODULE_LINES
    files = {"clock": text, "config": text[6:], "__main__": "", "model/__init__": ""}
    assert [sentence.split()[0] for sentence in too_short(tree(tmp_path, files))] == ["postroom.config"]


def test_a_repeated_stem_is_found(tmp_path: Path) -> None:
    files = {"store/row": "", "store/sql/row": "", "broker/row": "", "client/fetch": "", "client/a/fetch": ""}
    (found,) = repeated_stems(tree(tmp_path, files))
    assert found.startswith("postroom.store.row and postroom.store.sql.row")


def test_a_single_importer_is_found(tmp_path: Path) -> None:
    files = {
        "model/one": "",
        "model/two": "",
        "store/a": "from ..model import one, two",
        "store/b": "def f():\n    from ..model.two import x",
    }
    modules = tree(tmp_path, files)
    (found,) = single_importers(modules)
    assert found == "postroom.model.one is imported by postroom.store.a alone"
    assert single_importers(modules, frozenset({"postroom.store.a"})) == []
    assert single_importers(modules, public={"postroom.model.one"}) == []


@pytest.mark.parametrize(
    ("second", "is_cycle"),
    [
        ("from .one import x", True),
        ("try:\n    from . import one\nexcept ImportError: pass", True),
        ("if TYPE_CHECKING:\n    from .one import x", False),
        ("def f():\n    from .one import x", False),
    ],
)
def test_an_import_cycle_is_found(tmp_path: Path, second: str, is_cycle: bool) -> None:
    modules = tree(tmp_path, {"model/one": "from .two import y", "model/two": second})
    assert bool(import_cycle(modules)) is is_cycle


def test_a_missing_export_is_found(tmp_path: Path) -> None:
    text = """
        from .errors import A as B
        import os.path
        try:
            C = D, E = 1, 2
        except ValueError:
            E: int = 3
        def f():
            inner = 1
        __all__ = ["B", "C", "D", "E", "f", "os", "inner", "gone"]
    """
    found = missing_exports(tree(tmp_path / "a", {"clock": text}))
    assert [sentence.split("'")[1] for sentence in found] == ["inner", "gone"]
    submodule = tree(tmp_path / "b", {"__init__": "__all__ = ['clock']", "clock": ""})
    assert missing_exports(submodule) == []


def test_an_undrawn_error_is_found(tmp_path: Path) -> None:
    text = '''
        """Errors.

        Root
        ├── Drawn        fine
        └── Gone, Here   one of them was renamed
        """
        class Root(Exception): ...
        class Drawn(Root): ...
        class Here(Root): ...
        class Hidden(Root): ...
    '''
    module = tree(tmp_path, {"errors": text})["postroom.errors"]
    assert undrawn_errors(module) == [
        "Hidden is not in the tree",
        "Gone is in the tree but not in the module",
    ]
