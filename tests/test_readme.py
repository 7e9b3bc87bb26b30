"""The README's example of a task is a task."""

import asyncio
import re
from pathlib import Path

import numpy as np

from prl.domains.api import Context
from prl.domains.registry import find_domain, load_split
from prl.flow.versions import Version
from prl.streams.records import Turn, VersionSpan

README = (Path(__file__).parents[1] / "README.md").read_text()


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
