"""prl-submit whose nodes run the function of tests/cluster/jobs.py that the first argument names."""

import sys
from pathlib import Path

import cloudpickle

sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))
import jobs

import prl.orchestrator.agent
from prl.cli.submit import main

cloudpickle.register_pickle_by_value(jobs)
prl.orchestrator.agent.run_node = getattr(jobs, sys.argv[1])
sys.exit(main(sys.argv[2:]))
