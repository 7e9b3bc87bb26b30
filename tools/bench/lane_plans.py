"""Plans that bring new weights from trainer ranks to samplers, for models of four sizes, without the models.

    python tools/bench/lane_plans.py [--link-gbit 400] [--bucket-mib 256] [--models 7B 70B]

`plan`: CPU seconds of making it; `legs`: pairs of a rank and a worker that have something to send; `root`, `lane`: most bytes
that one of them carries; then times on links of this speed (92 per cent of it is payload). `least`: no transfer to so many
workers is shorter, whatever the plan: an equal share of the model each; `floor`: nor with this plan: the busier of `root` and
`lane`; `order`: what the plan's order of transfers takes, one bucket at a time.
"""

import argparse
import time
from typing import Any

from prl.config.hf_config import model_config
from prl.config.layout import Layout
from prl.weights.compile import compile_plan
from prl.weights.traffic import scheduled_s, traffic

PAYLOAD = 0.92
_BASE = {
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1536, "norm_topk_prob": True}


def _sizes(kind: str, layers: int, hidden: int, inner: int, **others: object) -> dict[str, Any]:
    sizes = {"model_type": kind, "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner}
    return _BASE | sizes | others


MODELS = {
    "7B": _sizes("qwen2", 28, 3584, 18944, num_attention_heads=28, num_key_value_heads=4, vocab_size=152064),
    "32B": _sizes("qwen3", 64, 5120, 25600),
    "70B": _sizes("llama", 80, 8192, 28672, vocab_size=128256),
    "235B": _sizes("qwen3_moe", 94, 4096, 12288, num_key_value_heads=4, **_EXPERTS),
}
# The model, how trainer ranks share it (tensor, pipeline, virtual, context, expert parallelism), ranks, workers of a sampler.
CASES = [
    ("7B", Layout(1, 1, 1, 1, 1), 8, 1),
    ("7B", Layout(4, 1, 1, 1, 1), 8, 4),
    ("32B", Layout(8, 1, 1, 1, 1), 16, 8),
    ("32B", Layout(4, 2, 2, 1, 1), 32, 8),
    ("70B", Layout(8, 4, 1, 1, 1), 64, 8),
    ("70B", Layout(8, 4, 1, 1, 1), 64, 4),
    ("235B", Layout(4, 2, 1, 1, 8), 64, 8),
    ("235B", Layout(2, 2, 1, 1, 32), 64, 8),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link-gbit", type=float, default=400.0, help="speed of each rank's and each worker's link")
    parser.add_argument("--bucket-mib", type=int, default=256)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    options = parser.parse_args()
    bytes_per_s = options.link_gbit * 1e9 / 8 * PAYLOAD
    print(
        f"{'model':6}{'trainer':44}{'workers':>8}{'plan':>9}{'legs':>6}{'root':>10}{'lane':>10}{'least':>9}{'floor':>9}{'order':>9}"
    )
    for name, layout, ranks, workers in CASES:
        if name not in options.models:
            continue
        started_s = time.process_time()
        plan = compile_plan(model_config(MODELS[name]), layout, ranks, workers, "bfloat16")
        plan_s = time.process_time() - started_s
        carried = traffic(plan)
        most = "".join(f"{max(sizes) / 1e9:7.2f} GB" for sizes in (carried.roots, carried.lanes))
        order_s = scheduled_s(plan, options.bucket_mib * 2**20, bytes_per_s)
        least_s = sum(spec.bytes for spec in plan.tensors) / workers / bytes_per_s
        times = f"{least_s:7.3f} s{carried.floor_s(bytes_per_s):7.3f} s{order_s:7.3f} s"
        print(f"{name:6}{_short(layout, ranks):44}{workers:8}{plan_s:7.2f} s{len(plan.legs):6}{most}{times}", flush=True)


def _short(layout: Layout, ranks: int) -> str:
    return layout.describe(ranks).replace(" parallel", "").replace(" in 2 turns", " (2 turns)")


if __name__ == "__main__":
    main()
