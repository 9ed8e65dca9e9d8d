"""Rules of the house that ruff and import-linter cannot express: which names belong to which files.

Read from the source as text or as a syntax tree; nothing is imported but for the doctests.
"""

import ast
import doctest
import importlib
import re
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("core", "models", "kernels", "data")
PRODUCT = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [
        *(file for package in PACKAGES for file in (ROOT / package).rglob("*.py")),
        *ROOT.glob("pretrain_*.py"),
    ]
)
SCRIPTS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "scripts").glob("*.py"))
TESTS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("*.py"))

# A name, and the product's files that may say it. Scripts may say all of them.
OWNERS = {
    "torch.distributed": ("core/comm/*", "core/launch/*", "core/launch.py", "core/checkpoint/*"),
    "os.environ": ("core/launch/*", "core/launch.py", "core/optional.py"),
    "os.getenv": (),
    "argparse": ("core/config.py", "core/config_*.py", "pretrain_*.py"),
}
# Where a device is chosen. Everything else asks its tensors: x.device, x.is_cuda.
CUDA_OWNERS = (
    *("core/launch/*", "core/launch.py", "core/optional.py", "kernels/*"),
    "core/tensor_parallel/random.py",  # Megatron-LM's tracker of generator states
)
# Standard library only: `--help`, the launcher and whoever draws a schedule need these.
PURE = (
    "core/batch_schedule.py",
    "core/comm/ledger.py",
    "core/config.py",
    "core/config_help.py",
    "core/config_record.py",
    "core/data_parallel/config.py",
    "core/data_parallel/layout.py",
    "core/data_parallel/memory.py",
    "core/flag_table.py",
    "core/grid.py",
    "core/known_flags.py",
    "core/layout_checks.py",
    "core/metrics.py",
    "core/metrics_sinks.py",
    "core/optimizer/config.py",
    "core/optimizer/precision.py",
    "core/optimizer/schedule.py",
    "core/pipeline_parallel/actions.py",
    "core/pipeline_parallel/draw.py",
    "core/pipeline_parallel/layout.py",
    "core/pipeline_parallel/measured.py",
    "core/pipeline_parallel/passes.py",
    "core/pipeline_parallel/placement.py",
    "core/pipeline_parallel/schedule_file.py",
    "core/pipeline_parallel/schedules.py",
    "core/pipeline_parallel/simulate.py",
    "core/progress.py",
    "core/shard.py",
    "core/step_clock.py",
    "core/traffic.py",
    "core/train_config.py",
    "data/config.py",
    "models/activations.py",
    "models/config.py",
    "models/flops.py",
    "models/recompute.py",
)
VAGUE_NAMES = ("utils", "helpers", "common", "misc")
LONGEST_FUNCTION, LONGEST_FILE = 60, 500


def source(name):
    return (ROOT / name).read_text(encoding="utf-8")


def owned(name, patterns):
    return any(fnmatch(name, pattern) for pattern in patterns)


def dotted(node):
    """`os.environ` of an attribute chain, or "" """
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def names_used(tree):
    """Every module, imported name and attribute chain of a file, aliases resolved."""
    aliases, found = {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found.add(alias.name)
                if alias.asname:
                    aliases[alias.asname] = alias.name
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                found.add(f"{node.module}.{alias.name}")
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if chain := dotted(node):
            head, _, rest = chain.partition(".")
            found.add(".".join(filter(None, [aliases.get(head, head), rest])))
    return found


def test_the_walk_sees_names():
    tree = ast.parse("import torch.distributed as d\nfrom os import environ as e\ne.x; d.f\n")
    assert {"torch.distributed", "os.environ", "os.environ.x", "torch.distributed.f"} <= names_used(
        tree
    )


def test_names_are_said_by_their_owners_only():
    wrong = [
        f"{name} says {use}"
        for name in PRODUCT
        for use in names_used(ast.parse(source(name)))
        for word, owners in OWNERS.items()
        if (use == word or use.startswith(word + ".")) and not owned(name, owners)
    ]
    assert not wrong


def test_devices_are_chosen_in_one_place():
    wrong = []
    for name in PRODUCT:
        literals = [
            node.value
            for node in ast.walk(ast.parse(source(name)))
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and re.fullmatch(r"cuda(:\d+)?", node.value)
        ]
        moves = re.findall(r"\.cuda\(", source(name))
        if (literals or moves) and not owned(name, CUDA_OWNERS):
            wrong.append((name, literals + moves))
    assert not wrong


def test_one_module_has_globals():
    says = [
        name
        for name in PRODUCT
        if any(isinstance(node, ast.Global) for node in ast.walk(ast.parse(source(name))))
    ]
    assert set(says) <= {"core/parallel_state.py"}


def test_files_have_telling_names():
    vague = {name for name in (*PRODUCT, *SCRIPTS, *TESTS) if Path(name).stem in VAGUE_NAMES}
    assert vague <= {"core/tensor_parallel/utils.py"}


def test_files_and_functions_are_small_enough_to_read():
    """A file with everything in it, a function without its docstring."""
    long = []
    for name in (*PRODUCT, *SCRIPTS):
        lines = len(source(name).splitlines())
        if lines > LONGEST_FILE:
            long.append(f"{name}: {lines} lines")
        for node in ast.walk(ast.parse(source(name))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                documented = ast.get_docstring(node) and len(node.body) > 1
                length = node.end_lineno - node.body[1 if documented else 0].lineno + 1
                if length > LONGEST_FUNCTION:
                    long.append(f"{name}: {node.name} has {length} lines")
    assert not long


def test_nothing_imports_scripts_or_tests():
    wrong = [
        f"{name} imports {use}"
        for name in PRODUCT
        for use in names_used(ast.parse(source(name)))
        if use.split(".")[0] in ("scripts", "tests")
    ]
    assert not wrong


def imports_at_run_time(tree):
    """Modules that a file imports, `if TYPE_CHECKING:` left out; `from a import b` may be a.b."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and dotted(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name,) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module, f"{node.module}.{alias.name}") for alias in node.names)
        else:
            yield from imports_at_run_time(node)


def test_pure_files_import_the_standard_library_and_each_other():
    pure = {name[:-3].replace("/", ".") for name in PURE} | {"core.optional"}
    wrong = [
        f"{name} imports {names[-1]}"
        for name in PURE
        if (ROOT / name).exists()
        for names in imports_at_run_time(ast.parse(source(name)))
        if names[0].split(".")[0] not in sys.stdlib_module_names and not pure & set(names)
    ]
    assert not wrong


@pytest.mark.parametrize("name", [name for name in PRODUCT if ">>> " in source(name)])
def test_examples_in_docstrings(name):
    module = importlib.import_module(name[:-3].replace("/", "."))
    failed, tried = doctest.testmod(module)
    assert tried and not failed


def test_packages_are_all_listed():
    listed = set(re.findall(r'^        "([\w.]+)",$', source("setup.py"), re.MULTILINE))
    there = {
        path.parent.relative_to(ROOT).as_posix().replace("/", ".")
        for package in PACKAGES
        for path in (ROOT / package).rglob("__init__.py")
    }
    assert listed == there


def test_every_test_folder_is_a_package():
    folders = {(ROOT / name).parent for name in TESTS}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []
