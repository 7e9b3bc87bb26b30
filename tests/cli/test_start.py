"""Where the commands start: quickly, without engines, and taking Ctrl-C from the beginning."""

import configparser
import os
import signal
import subprocess
import sys

import pytest
from submitting import ROOT

HEAVY = ("torch", "vllm", "megatron", "transformers", "pandas", "scipy", "tensorboard")
OF_OTHERS = ("pyarrow.compute", "prl.control.server", "prl.orchestrator.main", "prl.orchestrator.replay")  # and not light


@pytest.mark.parametrize("command", ["submit", "plan", "report"])
def test_ctrl_c_while_a_command_is_still_being_imported(config, command):
    """Its import stands still at a module that waits."""
    (config / "slow" / "argparse.py").parent.mkdir()
    (config / "slow" / "argparse.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    program = [sys.executable, "-c", f"import sys; from prl.cli import start; sys.exit(start.{command}())"]
    process = subprocess.Popen(
        program,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{config / 'slow'}:{ROOT}"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30)[1] == ""
    assert process.returncode == -signal.SIGINT


def test_the_commands_start_where_ctrl_c_is_taken():
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    scripts = settings["options.entry_points"]["console_scripts"].split("\n")[1:]
    assert scripts == [f"prl-{name} = prl.cli.start:{name}" for name in ("submit", "report", "plan")]


def test_a_login_node_never_imports_the_engines(config):
    code = (
        "import sys; from prl.cli.submit import main; code = main(['c.yaml', '--nodes', '3', '--dry-run']);"
        "import prl.orchestrator.agent;"  # what a submission imports besides
        f"print(code, [m for m in {HEAVY + OF_OTHERS} if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == "0 []\n"
