"""What a process has loaded when it starts to work is left alone by the collector of garbage."""

import asyncio
import os
import sys
from dataclasses import replace

import pytest

from prl.config.load import dump
from prl.config.schema import Config
from prl.control.server import ControlServer
from prl.control.token import create_token
from prl.runfolder.paths import RunFolder


@pytest.mark.parametrize("kind", ["run_child", "run_threaded_child"])
def test_a_full_collection_of_a_child_does_not_go_through_its_modules(tmp_path, kind):
    program = f"""
import gc
from prl.control.child import {kind}
{"async " if kind == "run_child" else ""}def main(child, client):
    raise RuntimeError(f"{{len(gc.get_objects())}} of {{gc.get_freeze_count() + len(gc.get_objects())}}")
{kind}(main)
"""
    run = RunFolder(tmp_path / "run")
    run.create()
    run.config.write_text(dump(replace(Config(), run={"name": "one", "folder": str(run)})))
    token = create_token(run.token)

    async def main():
        failed = []
        server = ControlServer(token, {}, on_join=lambda m: None, on_fail=lambda m, error, trace: failed.append(error))
        places = {"RUN": run, "ATTEMPT": 1, "ROLE": "actor", "INDEX": 0, "HOST": "127.0.0.1"}
        places["CONTROL_URL"] = await server.start("127.0.0.1")
        environment = os.environ | {f"PRL_{name}": str(value) for name, value in places.items()}
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, env=environment)
        async with asyncio.timeout(60):
            assert await process.wait() != 0
        await server.close()
        (error,) = failed
        collected, loaded = map(int, error.removeprefix("RuntimeError: ").split(" of "))
        assert loaded > 10_000
        assert collected < loaded / 10

    asyncio.run(main())
