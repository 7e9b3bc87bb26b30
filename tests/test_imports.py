"""Who may import whom, what must stay light, and what lies where. The table is the architecture: change it knowingly."""

import ast
import fnmatch
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "prl"

LAYERS = ("config", "runfolder", "metrics", "control", "streams")  # each may import the ones before it
BESIDES = {  # what a package may import besides layers, flow, options and itself
    "actor": ("domains", "verifier.client"),
    "cli": ("actor", "cluster", "domains", "orchestrator", "preprocess", "report", "verifier", "weights.plan"),
    "cluster": (),
    "domains": ("verifier.client",),
    "orchestrator": ("cluster",),
    "preprocess": (),
    "report": (),
    "sampler": ("weights",),
    "trainer": ("weights",),
    "verifier": ("domains",),
    "weights": (),
}
ENGINES = {
    "torch": ("trainer", "sampler", "weights"),
    "megatron": ("trainer",),
    "vllm": ("sampler",),
    "transformers": ("trainer", "sampler"),
    "safetensors": ("trainer", "sampler", "weights"),
    "triton": ("trainer",),
    "pandas": (),
    "tensorflow": (),
}
HEAVY = {"torch", "megatron", "vllm", "transformers", "pandas", "triton", "tensorflow", "scipy"}
NEVER = ("pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve")

SOURCES = sorted(PACKAGE.rglob("*.py"))


def package_of(path):
    """The package of prl that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0]


def imports_of(path):
    """(module, line) of everything that a file imports anywhere; `from a import b` counts as a and, in prl, as a.b."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            if node.module in ("prl", *(f"prl.{package}" for package in packages())):
                yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
            else:
                yield node.module, node.lineno


def packages():
    return sorted(path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists())


def allowed(package, module):
    """Whether files of `package` may import `prl.<module>`."""
    target = module.split(".")[0]
    if target in ("", package, "flow") or module.endswith(".options"):
        return True
    if package == "flow":
        return False
    if package in LAYERS:
        return target in LAYERS[: LAYERS.index(package)]
    besides = BESIDES[package]
    return target in LAYERS or any(module == entry or module.startswith(f"{entry}.") for entry in besides)


def test_every_package_is_in_the_table():
    assert set(packages()) == {*LAYERS, *BESIDES, "flow"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_follow_the_table(path):
    if path.parent == PACKAGE:
        return
    package, wrong = package_of(path), []
    for module, line in imports_of(path):
        top = module.split(".")[0]
        where = f"{path.relative_to(ROOT)}:{line}: {module}"
        if top in NEVER:
            wrong.append(f"{where} is refused everywhere")
        if top == "prl" and package == "flow" and not module.startswith("prl.flow"):
            wrong.append(f"{where}: flow imports nothing of prl")
        elif top == "prl" and not allowed(package, module.partition(".")[2]):
            wrong.append(f"{where} is not for {package}")
        if package not in ENGINES.get(top, (package,)):
            wrong.append(f"{where} is only for {', '.join(ENGINES[top]) or 'no one'}")
        if package == "flow" and top not in (*sys.stdlib_module_names, "numpy", "prl"):
            wrong.append(f"{where}: flow imports numpy alone")
        if path.name == "options.py" and top not in sys.stdlib_module_names and not module.startswith("prl.config.bounds"):
            wrong.append(f"{where}: options import nothing but the standard library and prl.config.bounds")
        if path == PACKAGE / "config" / "bounds.py" and top not in sys.stdlib_module_names:
            wrong.append(f"{where}: bounds import nothing but the standard library")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", [p for p in SOURCES if p.name == "__init__.py"], ids=lambda p: p.parent.name)
def test_package_files_are_empty(path):
    assert path.read_text() == ""


def entry_modules():
    """What processes other than trainer and sampler start from, and the torch-free half of weights."""
    mains = [PACKAGE / package / "__main__.py" for package in ("actor", "preprocess", "verifier")]
    return [
        *sorted(f"prl.cli.{path.stem}" for path in (PACKAGE / "cli").glob("[a-z]*.py")),
        *(f"prl.{path.parent.name}.__main__" for path in mains if path.exists()),
        *(f"prl.orchestrator.{path.stem}" for path in sorted((PACKAGE / "orchestrator").glob("[a-z]*.py"))),
    ]


@pytest.mark.parametrize("module", entry_modules())
def test_only_trainer_and_sampler_load_engines(module):
    program = (
        f"import sys, importlib; importlib.import_module({module!r}); print(*{{name.split('.')[0] for name in sys.modules}})"
    )
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert loaded.returncode == 0, loaded.stderr
    assert not HEAVY & set(loaded.stdout.split())


def test_a_nodes_agent_does_not_load_the_orchestrator_which_one_of_them_needs():
    program = "import sys, prl.orchestrator.agent; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert not {"prl.orchestrator.main", "prl.flow.dispatcher", "pyarrow", "tensorboard"} & set(loaded.stdout.split())


def cpu_seconds(arguments):
    """Processor seconds of a program that must end well."""
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize("command", sorted(path.stem for path in (PACKAGE / "cli").glob("[a-z]*.py")))
def test_commands_start_in_under_a_second(command):
    arguments = [sys.executable, "-m", f"prl.cli.{command}", "--help"]
    assert min(cpu_seconds(arguments) for _ in range(3)) < 1.0


# --- what lies where ---

TOP_LEVEL = {
    "prl", "slurm", "configs", "tests", "tools", "setup.cfg", "setup.py", "README.md",  # the design's
    ".ci", ".gitignore", "LICENSE",
}  # fmt: skip


def ignored_names():
    return [line.strip("/") for line in (ROOT / ".gitignore").read_text().split()]


def repository_files():
    """All files of the checkout that are not ignored."""
    patterns = [*ignored_names(), ".git"]
    for folder, folders, files in os.walk(ROOT):
        folders[:] = sorted(name for name in folders if not any(fnmatch.fnmatch(name, pattern) for pattern in patterns))
        yield from (Path(folder, name) for name in sorted(files) if name != ".git")


def test_top_level_holds_what_was_agreed():
    entries = {path.relative_to(ROOT).parts[0] for path in repository_files()}
    assert entries <= TOP_LEVEL


def explains_itself(path):
    """Whether a file's first lines say what it is: a comment or a docstring."""
    first = path.read_text().split("\n", 2)[:2]
    head = first[1] if first[0].startswith("#!") and len(first) > 1 else first[0]
    return head.startswith(("#", '"""', "{#"))


@pytest.mark.parametrize("top", ["configs", "slurm", "tools"])
def test_folders_explain_themselves(top):
    folders = {}
    for path in repository_files():
        if path.is_relative_to(ROOT / top):
            folders.setdefault(path.parent, []).append(path)
    for folder, files in folders.items():
        above = folder.parent / "README.md"
        named_above = folder.name != top and above.exists() and f"{folder.name}/" in above.read_text()
        if not named_above and not any(path.name == "README.md" and path.stat().st_size for path in files):
            silent = [str(path.relative_to(ROOT)) for path in files if not explains_itself(path)]
            assert not silent, f"no README.md in {folder.relative_to(ROOT)}, and no words at the top of {silent}"


def test_no_file_names_a_place_on_somebodys_machine():
    place = re.compile(r"(?<![\w.])/(work|root|home|Users|scratch)/")
    found = []
    for path in repository_files():
        if path == Path(__file__).resolve() or path.is_relative_to(ROOT / "tests"):
            continue  # tests name such places as examples
        for number, line in enumerate(path.read_bytes().decode(errors="replace").split("\n"), 1):
            if place.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}")
    assert not found, "\n".join(found)


def test_no_test_imports_from_a_conftest():
    """Of several folders that are tested at once, only one's is called so."""
    named = [path for path in ROOT.glob("tests/**/*.py") if re.search(r"(?m)^(from|import) conftest\b", path.read_text())]
    assert not named
