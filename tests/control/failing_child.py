"""A child of a run whose main raises."""

import asyncio
import os
import sys
from pathlib import Path

from prl.config.load import dump, replace
from prl.config.schema import Config
from prl.control.server import ControlServer
from prl.control.token import create_token
from prl.runfolder.paths import RunFolder


def reported(tmp_path: Path, kind: str, exception: str, log: Path = Path(os.devnull)) -> tuple[str, str]:
    """The error and the traceback that the orchestrator is told of a child under `kind` (run_child or run_threaded_child) whose
    main raises this expression; what it prints goes to `log`."""
    program = f"""
import errno, gc, os
from prl.control.child import {kind}
{"async " if kind == "run_child" else ""}def main(child, client):
    raise {exception}
{kind}(main)
"""
    run = RunFolder(tmp_path / "run")
    run.create()
    run.config.write_text(dump(replace(Config(), run={"name": "one", "folder": str(run)})))
    token = create_token(run.token)

    async def main() -> list[tuple[str, str]]:
        failed: list[tuple[str, str]] = []
        server = ControlServer(token, {}, on_join=lambda m: None, on_fail=lambda m, error, trace: failed.append((error, trace)))
        places = {"RUN": run, "ATTEMPT": 1, "ROLE": "actor", "INDEX": 0, "HOST": "127.0.0.1"}
        places["CONTROL_URL"] = await server.start("127.0.0.1")
        environment = os.environ | {f"PRL_{name}": str(value) for name, value in places.items()}
        with log.open("wb") as file:  # takes no time
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", program, env=environment, stdout=file, stderr=file
            )
        async with asyncio.timeout(60):
            assert await process.wait() != 0
        await server.close()
        return failed

    (told,) = asyncio.run(main())
    return told
