from pathlib import Path

import pytest
from submitting import CONFIG


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(CONFIG)
    Path("../rows.jsonl").write_text('{"problem": "Two and two?", "answer": 4}\n')
    return tmp_path
