"""The verifier as a child of a node agent."""

import asyncio

from prl.control.child import Child, run_child
from prl.control.client import ControlClient
from prl.metrics.events import MetricsWriter
from prl.verifier.pool import Pool
from prl.verifier.service import VerifierService

_REPORT_S = 10.0  # seconds between two lines of metrics


async def main(child: Child, control: ControlClient) -> None:
    options = child.config.verifier
    pool = Pool(options.processes, options.check_s, options.memory_mib)
    metrics = MetricsWriter(child.run.metrics, child.role, child.index, child.attempt, flush_s=child.config.metrics.flush_s)
    with metrics:
        async with pool, VerifierService(pool, child.token, child.host, child.port or 0) as service:
            await control.join({"url": service.url})
            control.progress("checking answers")
            while not control.stopping.is_set():
                before = service.checks
                try:
                    async with asyncio.timeout(_REPORT_S):
                        await control.stopping.wait()
                except TimeoutError:
                    metrics.write(
                        {"verifier/checks_per_s": (service.checks - before) / _REPORT_S, "verifier/killed": pool.killed}
                    )
                    control.progress("checking answers")


if __name__ == "__main__":
    run_child(main)
