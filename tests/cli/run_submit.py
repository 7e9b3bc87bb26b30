"""prl-submit whose nodes run the function of tests/cluster/jobs.py that the first argument names."""

import sys
from pathlib import Path

import cloudpickle

sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))
import jobs

import prl.orchestrator.agent
from prl.cli.submit import main
from prl.cluster import submission

cloudpickle.register_pickle_by_value(jobs)
prl.orchestrator.agent.run_node = getattr(jobs, sys.argv[1])
submission.SLURM_POLL_S = 1.0  # these functions write no exit.json, with which it would be asked sooner
sys.exit(main(sys.argv[2:]))
