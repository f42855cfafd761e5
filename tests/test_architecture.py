"""The import rules of the project, walked transitively over the source: a breach fails here, not in a review."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("schemas", "pipeline", "r2d2", "jobs")
MAY_IMPORT = {
    "schemas": {"schemas"},
    "pipeline": {"schemas", "pipeline"},
    "r2d2": {"schemas", "r2d2"},
    "jobs": set(PACKAGES),
}
# Outside library -> the module prefixes that may import it.
CONFINED = {
    "torch": ("r2d2", "jobs"),
    "gymnasium": ("pipeline.environments", "pipeline.export_minari"),
    "ale_py": ("pipeline.environments",),
    "minari": ("pipeline.export_minari",),
    "mlflow": ("pipeline.mlflow_", "jobs.model_scripts.mlflow_model"),
    "ray": ("pipeline.ray_",),
    "obstore": ("pipeline.object_store",),
}
# Copied into a model's folder and run there, never imported here.
SCRIPTS = {"jobs.model_scripts.mlflow_model", "jobs.model_scripts.load"}
# Costs seconds to import, so never at module level: only where the flag that asks for it is served.
LAZY = ("minari", "mlflow", "ray", "obstore", "pyarrow.flight")


def module_name(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


MODULES = {module_name(path): path for package in PACKAGES for path in (ROOT / package).rglob("*.py")}


def imports(module: str, *, top_level_only: bool) -> Iterator[str]:
    tree = ast.parse(MODULES[module].read_text())
    nodes = tree.body if top_level_only else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else str(node.module)


def reached(module: str) -> set[str]:
    """Every module and library that importing ``module`` imports, through our own modules."""
    seen: set[str] = set()
    todo = [module]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in MODULES:
            todo += imports(name, top_level_only=True)
            todo += [parent for parent in (name.rpartition(".")[0],) if parent in MODULES]
    return seen


def is_under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".") or (prefix.endswith("_") and name.startswith(prefix))


@pytest.mark.parametrize("module", sorted(MODULES))
def test_packages_import_only_what_they_may(module):
    package = module.split(".")[0]
    for name in imports(module, top_level_only=False):
        top = name.split(".")[0]
        if top in PACKAGES:
            assert top in MAY_IMPORT[package], f"{module} imports {name}"
        assert top != "tests", f"{module} imports {name}"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_libraries_stay_where_they_belong(module):
    for name in imports(module, top_level_only=False):
        for library, homes in CONFINED.items():
            if is_under(name, library):
                assert any(is_under(module, home) for home in homes), f"{module} imports {name}"


@pytest.mark.parametrize("module", sorted(MODULES.keys() - SCRIPTS))
def test_slow_libraries_are_not_reached_by_importing(module):
    found = {name for name in reached(module) for lazy in LAZY if is_under(name, lazy)}
    assert not found, f"importing {module} imports {found}"
    assert not reached(module) & SCRIPTS, f"{module} imports a script of a model's folder"


def test_the_storage_layer_never_reaches_torch_and_schemas_only_numpy_and_pyarrow():
    for module in MODULES:
        names = reached(module)
        if module.split(".")[0] in ("schemas", "pipeline"):
            assert not {name for name in names if is_under(name, "torch")}, module
        if module.split(".")[0] == "schemas":
            outside = {n.split(".")[0] for n in names} - {"schemas", "numpy", "pyarrow"}
            import sys

            assert outside <= set(sys.stdlib_module_names), (module, outside)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_nothing_that_is_read_back_can_run_code(module):
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            assert not {"pickle", "cloudpickle", "joblib", "dill", "shelve", "marshal"} & set(names), module
        if isinstance(node, ast.Call):
            call = ast.unparse(node.func)
            assert call not in ("torch.load", "eval", "exec"), f"{module} calls {call}"
            if call in ("np.load", "numpy.load"):
                assert not any(k.arg == "allow_pickle" for k in node.keywords), module


def test_modules_stay_readable():
    long = {name: n for name, path in MODULES.items() if (n := len(path.read_text().splitlines())) > 500}
    assert not long
    assert not [name for name in MODULES if name.endswith(("utils", "helpers", "misc"))]
