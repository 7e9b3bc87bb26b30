"""The verifier as a child of a node agent."""

import asyncio

from prl.control.child import Child, run_child
from prl.control.client import ControlClient
from prl.metrics.events import MetricsWriter
from prl.verifier.pool import Pool
from prl.verifier.service import VerifierService


async def main(child: Child, control: ControlClient) -> None:
    options, report_s = child.config.verifier, child.config.metrics.report_s
    pool = Pool(options.processes, options.check_s, options.memory_mib)
    metrics = MetricsWriter(child.run.metrics, child.role, child.index, child.attempt, flush_s=child.config.metrics.flush_s)
    with metrics:
        async with pool, VerifierService(pool, child.token, child.host, child.port or 0) as service:
            await control.join({"url": service.url})
            control.progress("checking answers")
            while not control.stopping.is_set():
                before = service.checks
                try:
                    async with asyncio.timeout(report_s):
                        await control.stopping.wait()
                except TimeoutError:
                    checks_per_s = (service.checks - before) / report_s
                    metrics.write({"verifier/checks_per_s": checks_per_s, "verifier/killed": pool.killed})
                    control.progress("checking answers")


if __name__ == "__main__":
    run_child(main)
