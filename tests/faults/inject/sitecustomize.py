"""Python imports this at the start of every process whose PYTHONPATH holds this folder, which is how faults get into the
processes of a whole run: by their environment, without any option of the product.

PRL_FAULTS_SAMPLER  "replay": a recorded sampler takes the place of prl.sampler; "record": the real one makes the recording
PRL_FAULTS_WORKER   what the workers of samplers are extended with in the place of prl's own: module.Class
PRL_FAULTS          JSON, see `faulty_process`: which process meets which fault
"""

import os
import sys

module = sys.orig_argv[sys.orig_argv.index("-m") + 1] if "-m" in sys.orig_argv[:4] else ""

if "PRL_FAULTS_SAMPLER" in os.environ and module == "prl.sampler":
    import importlib
    import runpy

    name = {"replay": "replayed_sampler", "record": "recorded_sampler"}[os.environ["PRL_FAULTS_SAMPLER"]]

    def run_instead(*_):
        importlib.import_module(name).main()

    runpy._run_module_as_main = run_instead

if "PRL_FAULTS_WORKER" in os.environ and module == "prl.sampler":
    from prl.sampler import server

    arguments = server.server_arguments

    def with_faults(*given):
        words = arguments(*given)
        words[words.index("--worker-extension-cls") + 1] = os.environ["PRL_FAULTS_WORKER"]
        return words

    server.server_arguments = with_faults

if "PRL_FAULTS_SAMPLER" in os.environ and module == "prl.trainer":

    def stay(*_):
        """Tests share their cores with others; a trainer that runs when nobody else does would not end in time."""

    os.sched_setscheduler = stay

if "PRL_FAULTS" in os.environ and (module.startswith("prl.") or module == "submitit.core._submit"):
    import faulty_process

    faulty_process.install(module)
