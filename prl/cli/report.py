"""prl-report RUN [--audit] [--json]: what a run did, read from its folder; also while it goes on."""

import argparse
import json
import os
import time
from collections.abc import Sequence

from prl.cli import console
from prl.cli.command_line import parse
from prl.config.load import ConfigError
from prl.config.paths import check_named, current_folder
from prl.report import audit
from prl.report.read import ReportError, read_run
from prl.report.render import render
from prl.report.summary import as_json, summarize


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="prl-report", description="Show what a run did, from the files in its folder.")
    parser.add_argument("run", help="run folder, as printed by prl-submit")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument(
        "--audit", action="store_true", help="prove that every rollout has exactly one end; exit code 1 where one has not"
    )
    console.prepare()
    options = parse(parser, arguments)
    try:
        check_named("prl-report", options.run)
        if not os.path.isabs(options.run):
            current_folder()
        if options.audit:
            result = audit.audit(options.run)
            text = json.dumps(audit.as_json(result), indent=1) if options.json else console.printable(audit.render(result))
            print(text, flush=True)
            return 0 if result.passed else 1
        summary = summarize(read_run(options.run), time.time())
        print(json.dumps(as_json(summary), indent=1) if options.json else console.printable(render(summary)), flush=True)
    except BrokenPipeError:  # the reader has read enough
        return 0
    except (ReportError, ConfigError) as error:
        console.refuse("prl-report", *error.args)
        return 1
    except OSError as error:
        console.refuse("prl-report", console.in_words(error))
        return 1
    finally:
        console.silence_broken()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
