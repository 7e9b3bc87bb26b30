"""A run's own copy of the code."""

import os
import py_compile
import subprocess
import sys

from prl.cluster.script import template_folder
from prl.runfolder import paths
from prl.runfolder.snapshot import snapshot_code


def test_nodes_need_not_compile_again_what_is_compiled(tmp_path):
    compiled = py_compile.compile(paths.__file__)
    assert compiled is not None
    code = tmp_path / "code"
    snapshot_code(code, template_folder())
    line = [sys.executable, "-v", "-c", "import prl.runfolder.paths as paths; print(paths.__file__)"]
    environment = {**os.environ, "PYTHONPATH": str(code), "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=True, timeout=60)
    copy = code / "prl" / "runfolder" / "paths.py"
    assert done.stdout == f"{copy}\n"
    assert any(line.endswith(f" matches {copy}") for line in done.stderr.splitlines())  # the compiled code is its
