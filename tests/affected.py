"""Tests that the changes since a commit can affect, nearest first: `python -m tests.affected
[BASE]`.

A symbol is a function, class or variable at the top of a module; `*` is the whole module. A symbol
depends on those that its source names, also through imports inside functions. Four kinds of
dependencies have no such name and are added: attributes of the lazy `smtrain` package, modules and
scripts in strings (they run as processes), commands that a test types, and fixtures by their
parameters. Other files affect the tests whose strings name them.
"""

from __future__ import annotations

import ast
import collections
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from smtrain import _HOME
from smtrain.cli import COMMANDS
from tests import durations
from tests.docs.pages import RUN, blocks

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("smtrain", "entrypoints", "testing", "tests", "scripts")
ALL = ("pyproject.toml", "setup.py", "scripts/setup", "scripts/packages", "tests/conftest.py")
"""Files that any test may depend on."""
STAGES = (
    "fetch",
    "prepare",
    "convert",
    "compile",
    "train",
    "export",
    "generate",
    "evaluate",
    "forking",
    "rendezvous",
)
STARTS = {"smtrain.client.launch.submit": ["launch"], "entrypoints.launch": STAGES}
"""Scripts of entrypoints/ that a module starts by a name made at run time."""
PAGES = "tests/docs/test_pages.py"

Symbol = tuple[str, str]
"""Module and name; the name is `*` for the whole module and empty for statements that run at its
import.
"""


_walked: dict[ast.AST, list[ast.AST]] = {}


def walk(node: ast.AST) -> list[ast.AST]:
    """All nodes of a part of a source; each part is walked once."""
    if node not in _walked:
        _walked[node] = list(ast.walk(node))
    return _walked[node]


@dataclass
class Module:
    """The symbols of a module with their source, and what its imports bind."""

    name: str
    path: str
    symbols: dict[str, list[ast.stmt]] = field(default_factory=dict)
    bound: dict[str, Symbol] = field(default_factory=dict)

    @classmethod
    def parse(cls, path: str, text: str) -> Module:
        module = cls(module_of(path), path)
        for statement in ast.parse(text, path).body:
            module._take(statement)
        return module

    def _take(self, statement: ast.stmt) -> None:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            self.bound |= bindings(statement, self.package)
        elif isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            self._add(statement.name, statement)
        elif isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            names = {
                node.id
                for target in targets
                for node in ast.walk(target)
                if isinstance(node, ast.Name)
            }
            for name in names or {""}:
                self._add(name, statement)
        elif isinstance(statement, (ast.If, ast.Try, ast.With)):
            for inner in ast.iter_child_nodes(statement):
                if isinstance(inner, ast.ExceptHandler):
                    for last in inner.body:
                        self._take(last)
                elif isinstance(inner, ast.stmt):
                    self._take(inner)
        elif not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Constant):
            self._add("", statement)

    def _add(self, name: str, statement: ast.stmt) -> None:
        self.symbols.setdefault(name, []).append(statement)

    @property
    def package(self) -> str:
        return self.name if self.path.endswith("/__init__.py") else self.name.rpartition(".")[0]

    def dumped(self, name: str) -> list[str]:
        """The source of a symbol without comments and layout, and what the imported names in it
        stand for.
        """
        statements = self.symbols.get(name, [])
        used = {
            n.id
            for s in statements
            for n in walk(s)
            if isinstance(n, ast.Name) and n.id in self.bound
        }
        return [
            *map(ast.dump, statements),
            *(f"{name}={self.bound[name]}" for name in sorted(used)),
        ]


def bindings(statement: ast.Import | ast.ImportFrom, package: str) -> dict[str, Symbol]:
    """Local names that an import makes, with the module or symbol behind each."""
    if isinstance(statement, ast.Import):
        return {
            a.asname or a.name.partition(".")[0]: (
                a.name if a.asname else a.name.partition(".")[0],
                "*",
            )
            for a in statement.names
        }
    parts = package.split(".")
    base = ".".join(parts[: len(parts) - statement.level + 1]) if statement.level else ""
    home = ".".join(filter(None, [base, statement.module or ""]))
    return {alias.asname or alias.name: (home, alias.name) for alias in statement.names}


def git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout


def default_base() -> str:
    """The commit at which this branch left the upstream main; HEAD if there is no upstream."""
    for name in ("@{upstream}", "origin/main", "upstream/main"):
        try:
            return git("merge-base", "HEAD", name).strip()
        except subprocess.CalledProcessError:
            continue
    return "HEAD"


def changed_since(base: str) -> list[str]:
    """Paths that differ from BASE, with files that git does not track yet."""
    listed = git("diff", "--name-only", base), git("ls-files", "--others", "--exclude-standard")
    return sorted({path for text in listed for path in text.splitlines()})


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@cache
def modules() -> dict[str, Module]:
    """All modules of the checkout."""
    files = (file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))
    paths = (file.relative_to(ROOT).as_posix() for file in files if "golden" not in file.parts)
    return {module_of(path): Module.parse(path, (ROOT / path).read_text("utf-8")) for path in paths}


def resolved(home: str, name: str) -> Symbol | None:
    """The symbol behind `home.name`, through packages that import it and the lazy `smtrain`; None
    if it is not ours.
    """
    if home == "smtrain" and name in _HOME:
        home = _HOME[name]
    if name == "*" and home in modules():
        return home, "*"
    if f"{home}.{name}" in modules():
        return f"{home}.{name}", "*"
    if home not in modules():
        script = f"entrypoints.{home}"
        return (
            (script, name if name in modules()[script].symbols else "*")
            if script in modules()
            else None
        )
    module = modules()[home]
    if name in module.bound and name not in module.symbols and module.bound[name] != (home, name):
        return resolved(*module.bound[name])
    return home, name


def used(module: Module, node: ast.AST) -> Iterator[Symbol]:
    """Symbols that a part of a module's source names."""
    inner_imports = imported(node, module.package)
    bound = {name: resolved(*symbol) for name, symbol in (module.bound | inner_imports).items()}
    yield from (symbol for name in inner_imports if (symbol := bound[name]) and symbol[1] != "*")
    inside: set[int] = set()  # nodes of chains that were resolved as a whole
    for inner in walk(node):
        if isinstance(inner, ast.Attribute) and id(inner) not in inside:
            chain, root = [inner.attr], inner.value
            while isinstance(root, ast.Attribute):
                chain.append(root.attr)
                root = root.value
            target = bound.get(root.id) if isinstance(root, ast.Name) else None
            if target and target[1] == "*":
                inside |= {id(part) for part in ast.walk(inner)}
                yield from filter(None, [_attribute(target[0], chain[::-1])])
        elif isinstance(inner, ast.Name) and id(inner) not in inside:
            if inner.id in module.symbols:
                yield module.name, inner.id
            elif target := bound.get(inner.id):
                yield target


def _attribute(home: str, chain: list[str]) -> Symbol | None:
    """The symbol behind a chain of attributes of a module: as many words as are modules, then a
    name.
    """
    while len(chain) > 1 and f"{home}.{chain[0]}" in modules():
        home, chain = f"{home}.{chain[0]}", chain[1:]
    return resolved(home, chain[0])


def strings(statements: Iterable[ast.AST]) -> set[str]:
    """String constants without docstrings."""
    nodes = [node for statement in statements for node in walk(statement)]
    alone = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    return {
        n.value
        for n in nodes
        if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in alone
    }


def named_in(texts: Iterable[str]) -> Iterator[Symbol]:
    """Modules and scripts of entrypoints/ whose names stand in strings."""
    for text in texts:
        for name in re.findall(r"\b(?:smtrain|tests)(?:\.\w+)+", text):
            home, _, last = name.rpartition(".")
            if name in modules():
                yield name, "*"
            elif home in modules() and last in modules()[home].symbols:
                yield home, last
        for name in re.findall(r"(?:^|[/\s])(\w+)\.py\b", text):
            if f"entrypoints.{name}" in modules():
                yield f"entrypoints.{name}", "*"


def commands_typed(texts: Iterable[str]) -> set[Symbol]:
    """The modules of the commands of `smtrain` whose names stand in strings as words of their
    own.
    """
    words = {word for text in texts for word in re.findall(r"(?<![\w./-])[a-z]+(?![\w./-])", text)}
    return {(module, "*") for name, (module, _) in COMMANDS.items() if name in words}


def types_commands(module: Module) -> bool:
    """Whether a test module calls the command line, in this process or another."""
    bodies = [statement for statements in module.symbols.values() for statement in statements]
    names = {
        resolved(*symbol) for body in bodies for symbol in imported(body, module.package).values()
    }
    names |= {resolved(*symbol) for symbol in module.bound.values()}
    started = any(re.search(r"(?:^|/|-m )smtrain(?:$| )", text) for text in strings(bodies))
    mains = {
        ("smtrain.cli", "main"),
        ("smtrain.cli", "COMMANDS"),
        ("smtrain.cli", "*"),
        ("tests.warm", "*"),
    }
    return started or bool(names & mains)


def imported(node: ast.AST, package: str) -> dict[str, Symbol]:
    """Local names that the imports inside a part of a source make."""
    symbols: dict[str, Symbol] = {}
    for inner in walk(node):
        if isinstance(inner, (ast.Import, ast.ImportFrom)):
            symbols |= bindings(inner, package)
    return symbols


def conftests(path: str) -> Iterator[Module]:
    """The conftest.py files that apply to a test file, the nearest first."""
    parts = Path(path).parts
    for count in range(len(parts) - 1, 0, -1):
        conftest = ".".join([*parts[:count], "conftest"])
        if conftest in modules():
            yield modules()[conftest]


def fixtures(module: Module, statement: ast.stmt) -> Iterator[Symbol]:
    """Fixtures that a test or fixture takes by its parameters, and those that apply by
    themselves.
    """
    homes = [module, *(home for home in conftests(module.path) if home is not module)]
    arguments = [node for node in walk(statement) if isinstance(node, ast.arguments)]
    names = {a.arg for args in arguments for a in [*args.posonlyargs, *args.args, *args.kwonlyargs]}
    names |= {
        word for text in strings([statement]) for word in [text] if word.isidentifier()
    }  # usefixtures("name")
    for name in sorted(names):
        home = next((home for home in homes if name in home.symbols), None)
        if home:
            yield home.name, name
        elif name in module.bound and (symbol := resolved(*module.bound[name])):
            yield symbol
    for home in homes:
        yield from ((home.name, name) for name in autouse(home.name))


@cache
def autouse(name: str) -> list[str]:
    """Symbols of a test module or conftest that apply to all its tests: marks, and fixtures with
    `autouse`.
    """
    names = []
    for symbol, statements in modules()[name].symbols.items():
        texts = [
            ast.unparse(decorator)
            for statement in statements
            for decorator in _decorators(statement)
        ]
        if symbol == "pytestmark" or any("autouse=True" in text for text in texts):
            names.append(symbol)
    return names


def _decorators(statement: ast.stmt) -> list[ast.expr]:
    return getattr(statement, "decorator_list", [])


Graph = dict[Symbol, set[Symbol]]


def graph() -> Graph:
    """The symbols that depend on each symbol."""
    edges: Graph = collections.defaultdict(set)
    for module in modules().values():
        of_tests = module.name.startswith("tests.")
        types = of_tests and types_commands(module)
        # The tables in `smtrain` and `smtrain.cli` name everything; a module that uses a name of
        # them has its own edge.
        tables = module.name in ("smtrain", "smtrain.cli")
        for name, statements in module.symbols.items():
            this = module.name, name
            edges[this].add((module.name, "*"))
            needs = {("entrypoints." + script, "*") for script in STARTS.get(module.name, ())}
            if name and "" in module.symbols:
                needs.add((module.name, ""))
            texts = strings(statements)
            for statement in statements:
                needs |= set(used(module, statement))
                if of_tests:
                    needs |= set(fixtures(module, statement))
                for decorator in _decorators(statement):
                    # What registers a function gives it to those that use the registry:
                    # `@app.command()`.
                    for registry in used(module, decorator):
                        if registry[0] == module.name:
                            edges[this].add(registry)
            if not tables:
                needs |= set(named_in(texts))
            if types:
                needs |= commands_typed(texts)
            for symbol in needs - {this}:
                edges[symbol].add(this)
    for home, name in list(edges):
        # A name that the module has no more, or one that it makes in another way, comes with the
        # whole module.
        if home in modules() and name != "*" and name not in modules()[home].symbols:
            edges[home, "*"].add((home, name)) if name else None
    return edges


def changed_symbols(path: str, base: str) -> Iterator[Symbol]:
    """Symbols of a Python file that differ from those at BASE; comments and layout make no
    difference.
    """
    name = module_of(path)
    now = modules().get(name)
    try:
        before = Module.parse(path, git("show", f"{base}:{path}"))
    except (subprocess.CalledProcessError, SyntaxError):
        before = None
    names = {*(now.symbols if now else ()), *(before.symbols if before else ())}
    for symbol in sorted(names):
        if not now or not before or now.dumped(symbol) != before.dumped(symbol):
            yield name, symbol


def naming(path: str) -> Iterator[Symbol]:
    """Symbols that name a file which is no Python module: a page, an example, facts, a golden
    file.
    """
    file = Path(path)
    if path.startswith("smtrain/") and not path.startswith("smtrain/core/facts/"):
        yield module_of(file.parent.as_posix()), "*"
        return
    if path.startswith("tests/") and len(file.parts) > 2:
        folder = ".".join(file.parts[:2]) + "."
        yield from (
            (module.name, "*") for module in modules().values() if module.name.startswith(folder)
        )
        return
    facts = path.startswith("smtrain/core/facts/")
    word = (
        file.stem if facts else file.name if file.suffix else path
    )  # `test` is a word, `scripts/test` a name
    named = re.compile(rf"(?:^|[\s/\"'`]){re.escape(word)}(?:$|[\s:\"'`])")
    folders = {parent.as_posix() for parent in file.parents if parent != Path(".")}
    for module in modules().values():
        if module.name.startswith("smtrain." if facts else "tests."):
            for name, statements in module.symbols.items():
                if any(named.search(text) or text in folders for text in strings(statements)):
                    yield module.name, name


def distances(changed: Iterable[Symbol], edges: Graph) -> dict[Symbol, int]:
    """Symbols that depend on the changed ones, and how many steps away they are."""
    far: dict[Symbol, int] = dict.fromkeys(changed, 0)
    for home, name in list(far):
        if name == "*" and home in modules():
            far |= dict.fromkeys(((home, inner) for inner in modules()[home].symbols), 0)
    queue = collections.deque(far)
    while queue:
        symbol = queue.popleft()
        for other in sorted(edges.get(symbol, ())):
            if other not in far:
                far[other] = far[symbol] + 1
                queue.append(other)
    return far


def is_test(module: str, name: str) -> bool:
    in_file = module.startswith("tests.") and module.rpartition(".")[2].startswith("test_")
    return in_file and name.startswith(("test_", "Test"))


def affected(changed: Iterable[str], base: str = "HEAD") -> list[str]:
    """Arguments for pytest: test files or tests of them, nearest first; `tests` if a change can
    affect all.
    """
    changed = list(changed)
    if any(path in ALL for path in changed):
        return ["tests"]
    starts: set[Symbol] = set()
    for path in changed:
        python = path.endswith(".py") and path.split("/")[0] in FOLDERS
        starts |= set(changed_symbols(path, base) if python else naming(path))
    edges = graph()
    far = {
        symbol: n
        for symbol, n in distances(starts, edges).items()
        if is_test(*symbol) and symbol[0] in modules()
    }
    tests: dict[str, list[str]] = collections.defaultdict(list)
    nearest: dict[str, int] = {}
    for (home, name), steps in far.items():
        if name in modules()[home].symbols:
            tests[home].append(name)
            nearest[home] = min(steps, nearest.get(home, steps))
    last = durations.known()

    def order(home: str) -> tuple[int, float]:
        file = modules()[home].path
        return nearest[home], last[file].wall if file in last else 0.0

    chosen: list[str] = []
    for home in sorted(sorted(tests), key=order):
        file, symbols = modules()[home].path, modules()[home].symbols
        if file == PAGES and (pages := _only_pages(changed)):
            chosen += [f"{file}::{test}" for page in pages for test in _of_a_page(page)]
        elif "" in symbols or len(tests[home]) == sum(is_test(home, name) for name in symbols):
            # A file that skips itself as it is imported has no tests by name, and pytest would run
            # nothing.
            chosen.append(file)
        else:
            chosen += [f"{file}::{name}" for name in symbols if name in tests[home]]
    return chosen


def _only_pages(changed: list[str]) -> list[str]:
    """The changed files if all are pages of the docs: then only their own cases run."""
    pages = [
        path
        for path in changed
        if path.startswith("docs/") and path.endswith(".md") and (ROOT / path).exists()
    ]
    return pages if len(pages) == len(changed) else []


def _of_a_page(path: str) -> list[str]:
    runs = any(block.tag in RUN for block in blocks(ROOT / path))
    tests = [
        "test_blocks_are_of_kinds_that_are_run_or_shown",
        *(["test_a_page_does_what_it_says"] if runs else []),
    ]
    return [f"{test}[{Path(path).stem}]" for test in tests]


def main(words: list[str]) -> int:
    """Print the arguments, one a line, and on stderr a count.

    The status is 2 for a wrong BASE or file.
    """
    base = words[0] if words else default_base()
    try:
        git("rev-parse", "--verify", "--quiet", f"{base}^{{commit}}")
    except subprocess.CalledProcessError:
        print(
            f"changed: {base!r} is no commit of this checkout; give a commit, a branch or a tag",
            file=sys.stderr,
        )
        return 2
    changed = changed_since(base)
    try:
        chosen = affected(changed, base)
    except SyntaxError as error:
        print(
            f"changed: {error.filename}:{error.lineno} is not Python: {error.msg}; correct it"
            " first",
            file=sys.stderr,
        )
        return 2
    files = {argument.partition("::")[0] for argument in chosen}
    print(
        f"changed: {len(changed)} files since {base[:12]} can affect tests in {len(files)} files",
        file=sys.stderr,
    )
    print("\n".join(chosen), end="\n" if chosen else "")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
