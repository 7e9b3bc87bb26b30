#!/usr/bin/env python3
"""Writes a checkpoint of a run as a Hugging Face folder, which transformers and vLLM load.

    python tools/export_checkpoint.py runs/qwen7b exported                    the newest whole checkpoint
    python tools/export_checkpoint.py runs/qwen7b exported --step 100
    python tools/export_checkpoint.py runs/qwen7b exported --dtype bfloat16   half as large as float32

Runs on one CPU without the run's job, in little more memory than the 2 GiB of one file of weights (or a larger tensor).
"""

import argparse
import sys
from pathlib import Path

from prl.config.hf_config import UnsupportedModelError
from prl.runfolder.manifest import ManifestError, check_parts, newest_manifest, read_manifest
from prl.runfolder.paths import RunFolder


def main() -> int:
    options = parse()
    run = RunFolder(options.run)
    try:
        step = whole_checkpoint(run, options.step)
        if options.target.exists():
            raise FileExistsError(f"{options.target} exists; remove it, or name another folder")
        from prl.trainer.export import export_checkpoint  # torch takes seconds

        export_checkpoint(run.checkpoint(step) / "trainer", run.model, options.target, options.dtype)
    except (UnsupportedModelError, ManifestError, OSError, ValueError) as error:
        print(f"export_checkpoint: {error}", file=sys.stderr)
        return 1
    size = sum(path.stat().st_size for path in options.target.iterdir())
    print(f"step {step}: {options.target}, {size / 1e9:.1f} GB")
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("target", type=Path, help="folder to be written")
    parser.add_argument("--step", type=int, metavar="N", help="of this step; default: the newest")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: the trained model's")
    return parser.parse_args()


def whole_checkpoint(run: RunFolder, step: int | None) -> int:
    """The step of a checkpoint all of whose files are what its manifest says. Raises ManifestError."""
    if step is not None:
        there = [str(number) for number, _ in run.manifests()]
        if str(step) not in there:
            raise ManifestError(f"{run}: has no checkpoint of step {step}; it has {', '.join(there) or 'none'}")
        check_parts(run.manifest(step), read_manifest(run.manifest(step)))
        return step
    manifest, refused = newest_manifest(run, parts=True)
    for words in refused:
        print(f"export_checkpoint: {words}", file=sys.stderr)
    if manifest is None:
        raise ManifestError(f"{run}: no whole checkpoint lies there")
    return manifest.step


if __name__ == "__main__":
    sys.exit(main())
