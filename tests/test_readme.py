"""The README's example of a task is a task."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import numpy as np

from prl.cli import submit
from prl.domains.api import Context
from prl.domains.registry import find_domain, load_split
from prl.flow.versions import Version
from prl.streams.records import Turn, VersionSpan

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


class Letters:
    """A tokenizer whose tokens are characters, and a sampler that answers the same word always."""

    end_ids = (0,)

    def encode(self, text):
        return [ord(letter) for letter in text]

    def decode(self, ids):
        return "".join(chr(i) for i in ids if i)

    def chat(self, messages):
        return self.encode("".join(message["content"] for message in messages))

    async def generate(self, prompt_ids, *, max_tokens):
        assert max_tokens == 16
        ids = np.array([*self.encode("tsam"), 0], np.int32)
        span = VersionSpan(Version(0, 0), 0, len(ids))
        return Turn(np.array(prompt_ids, np.int32), ids, np.zeros(len(ids), np.float32), (span,), "stop", 0, 0.0, 1.0)


def test_options_and_commands_that_it_names_exist(capsys):
    assert submit.main(["--options"]) == 0
    options = capsys.readouterr().out
    keys = re.findall(r"`((?:run|model|train|sample|actor|preprocess|streams|cluster)\.[a-z_.]+)(?:: [^`]*)?`", README)
    assert len(keys) > 10
    assert [key for key in keys if f" {key} = " not in options and f"\n{key}:" not in options] == []
    usage = subprocess.run(
        [sys.executable, "-m", "prl.cli.submit", "--help"], capture_output=True, text=True, check=True
    ).stdout
    flags = [flag for line in re.findall(r"prl-submit .*", README) for flag in re.findall(r"--[a-z-]+", line)]
    assert {"--resume", "--replay"} < set(flags)
    assert [flag for flag in flags if flag not in usage] == []


def test_the_example_put_into_the_quickstart_is_refused_before_a_start_and_told_how_it_goes(tmp_path, monkeypatch, capsys):
    (source,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (tmp_path / "my_letters.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    quickstart = [str(ROOT / "configs/quickstart.yaml"), "--dry-run", "--set", "domains=[{name: my_letters}]"]
    assert submit.main(quickstart) == 2
    assert "domain my_letters builds its prompts with the model's chat template" in capsys.readouterr().err
    assert submit.main([*quickstart, "model.tokenizer=bytes"]) == 0


def test_the_example_of_a_task_works(tmp_path, monkeypatch):
    (source,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (tmp_path / "letters.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    domain = find_domain("letters")
    problems = load_split(domain, {}, "train", 1)
    held_out = load_split(domain, {}, "evaluate", 1)
    assert not {p.data["word"] for p in problems} & {p.data["word"] for p in held_out}
    letters = Letters()
    context = Context(letters, None, {"max_tokens": 16})
    rewards = [asyncio.run(domain.generate_rollout(problem, letters, context)).reward for problem in problems]
    assert rewards == [1.0, 0.0, 0.0, 0.0]  # "mast" alone is "tsam" backwards
