"""What must hold for the rollouts of any run, however often it was interrupted: nothing is lost and nothing doubled.

Reckoned from the ledger and the step files alone; what `prl-report --audit` finds is added."""

from collections import Counter, defaultdict

from prl.report.audit import audit
from prl.runfolder.paths import RunFolder
from prl.runfolder.reclaim import read_reclaimed
from prl.streams.ledger import ledger_events, read_ledger
from prl.streams.steps import find_steps, read_step


def problems(run: RunFolder, *, ended: bool) -> list[str]:
    """What is wrong, in words. `ended`: the run has come to its end, so that nothing may be in flight any more."""
    found = []
    issued: Counter = Counter()
    otherwise: Counter = Counter()
    trained = defaultdict(list)  # id -> [(lineage, step)]
    order = defaultdict(list)  # lineage -> steps, as they were recorded
    for event in ledger_events(read_ledger(run.ledgers)):
        if event.kind == "issued":
            issued[event.rollout] += 1
        elif event.kind == "trained":
            trained[event.rollout].append((event.version.lineage, event.step))
            if event.step not in order[event.version.lineage][-1:]:
                order[event.version.lineage].append(event.step)
        else:
            otherwise[event.rollout] += 1
    found += [f"{i} was issued {n} times" for i, n in issued.items() if n > 1]
    found += [f"{i} was never issued" for i in {*otherwise, *trained} - set(issued)]
    found += [f"{i} ended otherwise {n} times" for i, n in otherwise.items() if n > 1]
    found += [f"{i} was trained and ended otherwise" for i in set(trained) & set(otherwise)]
    for rollout, places in trained.items():
        if len({step for _, step in places}) > 1:
            found.append(f"{rollout} was trained in several steps: {places}")
        if len(set(places)) < len(places):
            found.append(f"{rollout} was trained twice in one lineage: {places}")
    if ended:
        found += [f"{i} has no end" for i in set(issued) - set(otherwise) - set(trained)]
    for lineage, steps in order.items():
        if steps != list(range(steps[0], steps[0] + len(steps))):
            found.append(f"lineage {lineage} trained the steps {steps}")
    last = {}  # step -> the last lineage that trained it
    for lineage, steps in sorted(order.items()):
        last.update(dict.fromkeys(steps, lineage))
    if sorted(last) != list(range(1, len(last) + 1)):
        found.append(f"trained were the steps {sorted(last)}")
    files = find_steps(run.steps)
    gone = {file.step for file in read_reclaimed(run)}
    for step, lineage in last.items():
        ids = {rollout for rollout, places in trained.items() if (lineage, step) in places}
        file = files.get(step)
        if file is None and step in gone:
            continue
        if file is None:
            found.append(f"step {step} was trained and has no file")
        elif set(read_step(file.path, file.bytes, file.checksum).rollout_ids()) != ids:
            found.append(f"the file of step {step} holds other rollouts than were trained in it")
    return found + [f"audit: {one['what']}: {one['wrong']}" for one in audit(run.path).named]
