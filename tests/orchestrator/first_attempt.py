"""A first attempt, played by hand: what it wrote before it died."""

import json

from left_behind import step_file, write_checkpoint

from prl.config.schema import Config
from prl.domains.options import DomainOptions
from prl.flow.dispatcher import Dispatcher
from prl.flow.versions import Version
from prl.orchestrator.options import RunOptions
from prl.orchestrator.resume import dispatcher_settings
from prl.runfolder.model import write_model_folder
from prl.runfolder.paths import RunFolder
from prl.streams.ledger import LedgerWriter
from prl.trainer.options import ModelOptions

CONFIG = Config(
    run=RunOptions(name="r", id="1", steps=10, groups_per_step=2, rollouts_per_group=3, max_lag=2),
    domains=(DomainOptions(name="digits"),),
)


class Attempt:
    """A first attempt, played by hand: what it wrote before it died."""

    def __init__(self, tmp_path):
        self.run = RunFolder(tmp_path / "run")
        self.run.create()
        self.run.attempt(1).mkdir()
        write_model_folder(ModelOptions(init="random", architecture="qwen2"), self.run.model)  # of 16 tokens
        self.run.plan(1).write_text(json.dumps({"lineage": 0, "forks": {}, "refused": []}))
        self.dispatcher = Dispatcher(dispatcher_settings(CONFIG))
        self.ledger = LedgerWriter(self.run.ledger(1))
        self.dispatcher.problems({"digits": 100}, {})
        self.dispatcher.committed(Version(0, 0))
        self.leases = {}

    def lease(self, groups):
        leased = self.dispatcher.lease(0, groups, 0.0)
        self.ledger.append(leased.events)
        self.leases |= {lease.group: lease for lease in leased.leases}
        for lease in leased.leases:
            self.dispatcher.result(lease.group, lease.issue)
        return [lease.group for lease in leased.leases]

    def ids(self, *groups):
        return [rollout for group in groups for rollout in self.leases[group].rollout_ids()]

    def train(self, step, *groups):
        step_file(self.run, step, self.ids(*groups), step)
        self.ledger.append(self.dispatcher.trained(step, self.ids(*groups)))
        self.dispatcher.committed(Version(0, step))

    def checkpoint(self, step):
        write_checkpoint(self.run, step, self.dispatcher.state())


def one_checkpoint(tmp_path):
    """Of the groups 0 to 5 step 1 was trained on 0 and 1, and saved."""
    first = Attempt(tmp_path)
    first.lease(6)
    first.train(1, 0, 1)
    first.checkpoint(1)
    return first


def two_checkpoints(tmp_path):
    """And step 2 on 2 and 3."""
    first = one_checkpoint(tmp_path)
    first.train(2, 2, 3)
    first.checkpoint(2)
    return first


def flip(path, position, bit=0):
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)
