"""Which module may import which: a walk over the syntax trees of megadiff and launch; imports neither."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# From the bottom up; a package may import packages of lower layers and of its own name, never its neighbours.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("config",),
    ("ops", "dist"),
    ("models", "diffusion"),
    ("parallel", "data", "sampling", "adapters"),
    ("checkpoint", "evaluation", "planner"),
    ("engine",),
    ("cli_convert", "cli_evaluate", "cli_sample"),
    ("cli", "__main__"),
    ("launch",),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

# What the mathematics must not see: ranks, process groups, the environment.
PURE_PACKAGES = ("models", "diffusion")
HIDDEN_FROM_PURE = ("torch.distributed", "deepspeed", "os.environ", "os.getenv", "os.putenv")
# A bad setting has to fail in milliseconds.
TORCH_FREE_PACKAGES = ("config", "errors")
HIDDEN_FROM_TORCH_FREE = ("torch", "deepspeed", "numpy", "transformers", "diffusers")


class Violation(NamedTuple):
    """One import or attribute that a file may not use."""

    path: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}"


def package_of(path: Path, root: Path) -> str:
    """The layer name of a file: `megadiff/models/dit.py` -> models, `megadiff/errors.py` -> errors."""
    parts = path.relative_to(root).parts
    if parts[0] != "megadiff":
        return parts[0]
    return parts[1].removesuffix(".py") if len(parts) > 1 else "megadiff"


def dotted_name(node: ast.AST) -> str | None:
    """`a.b.c` of an attribute chain or a name, None for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted_name(node.value)
        return None if base is None else f"{base}.{node.attr}"
    return None


def absolute_module(node: ast.ImportFrom, path: Path, root: Path) -> str:
    """The module that a `from ... import` names, with leading dots resolved."""
    if node.level == 0:
        return node.module or ""
    folder = path.relative_to(root).parts[: -node.level]
    return ".".join((*folder, *(node.module.split(".") if node.module else ())))


def imports_of(tree: ast.AST, path: Path, root: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything imported, also inside functions and under TYPE_CHECKING."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            module = absolute_module(node, path, root)
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"


def attributes_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every attribute chain, such as `torch.distributed.all_reduce`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name = dotted_name(node)
            if name is not None:
                yield node.lineno, name


def is_under(name: str, prefixes: tuple[str, ...]) -> bool:
    """Whether a dotted name is one of the prefixes or inside one."""
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def direction_error(package: str, imported: str) -> str | None:
    """Why `package` may not import the dotted name, None if it may."""
    parts = imported.split(".")
    target = parts[1] if parts[0] == "megadiff" and len(parts) > 1 else parts[0]
    if parts[0] not in ("megadiff", "launch") or target in (package, "__version__"):
        return None
    if target not in LEVEL:
        return f"{imported} is in no layer; add {target} to LAYERS"
    if package not in LEVEL:
        return f"{package} is in no layer; add it to LAYERS"
    if LEVEL[target] >= LEVEL[package]:
        return f"{package} may not import {imported}: {target} is not in a lower layer"
    return None


def check_file(path: Path, root: Path) -> list[Violation]:
    """All violations in one file."""
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    package = package_of(path, root)
    shown = str(path.relative_to(root))
    imported = list(imports_of(tree, path, root))
    found = [
        Violation(shown, line, reason)
        for line, name in imported
        if (reason := direction_error(package, name)) is not None
    ]
    hidden = HIDDEN_FROM_PURE if package in PURE_PACKAGES else ()
    if package in TORCH_FREE_PACKAGES:
        hidden = HIDDEN_FROM_TORCH_FREE
    used = {*imported, *attributes_of(tree)}
    forbidden = [(line, name) for line, name in used if is_under(name, hidden)]
    found += [Violation(shown, line, f"{package} may not use {name}") for line, name in forbidden]
    return sorted(found)


def check_tree(root: Path) -> list[Violation]:
    """All violations in `root/megadiff` and `root/launch`."""
    files = sorted(path for part in ("megadiff", "launch") for path in (root / part).rglob("*.py"))
    return [violation for path in files for violation in check_file(path, root)]
