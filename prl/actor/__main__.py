"""An actor as a child of a node agent."""

import asyncio
from contextlib import AsyncExitStack

from prl.actor.loop import Actor, Parts
from prl.actor.publisher import rollout_publisher
from prl.actor.sampler_client import SamplerClient
from prl.actor.tasks import load_tasks
from prl.actor.tokenizer import ModelTokenizer
from prl.config.hf_config import read_model_config
from prl.control.child import Child, run_child
from prl.control.client import ControlClient
from prl.control.garbage import leave_what_is_loaded
from prl.metrics.events import MetricsWriter
from prl.verifier.client import VerifierClient


async def main(child: Child, control: ControlClient) -> None:
    config = child.config
    async with AsyncExitStack() as stack:
        metrics = stack.enter_context(
            MetricsWriter(child.run.metrics, child.role, child.index, child.attempt, flush_s=config.metrics.flush_s)
        )
        samplers = await stack.enter_async_context(
            SamplerClient(
                child.token,
                request_s=config.actor.request_s,
                max_model_len=config.sample.max_model_len,
                max_answers=config.sample.max_num_seqs,
                vocabulary=read_model_config(child.model).vocabulary,
            )
        )
        verifier = await stack.enter_async_context(VerifierClient(child.token, deadline_s=config.actor.request_s))
        tasks = await asyncio.to_thread(
            load_tasks,
            config.domains,
            config.run.seed,
            ModelTokenizer(child.model),
            verifier if config.verifier.processes > 0 else None,
        )
        leave_what_is_loaded()  # the problems, too
        publisher = rollout_publisher(child.run, config.run.mark, child.attempt, control, config.streams, config.control)
        await control.join(
            {
                "problems": {name: len(task.train) for name, task in tasks.items()},
                "evaluation": {name: len(task.evaluate) for name, task in tasks.items()},
            }
        )
        control.progress("waiting for the first lease")
        parts = Parts(tasks, control, samplers, verifier, publisher, metrics)
        enough = config.run.min_rollouts_per_group
        await Actor(parts, config.actor, call_s=config.control.trainers_s, enough=enough).run()


if __name__ == "__main__":
    run_child(main)
