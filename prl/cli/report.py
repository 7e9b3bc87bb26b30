"""prl-report RUN [--json]: what a run did, read from its folder; also while it goes on."""

import argparse
import json
import sys
import time
from collections.abc import Sequence

from prl.report.read import ReportError, read_run
from prl.report.render import render
from prl.report.summary import as_json, summarize


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="prl-report", description="Show what a run did, from the files in its folder.")
    parser.add_argument("run", help="run folder, as printed by prl-submit")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args(arguments)
    try:
        summary = summarize(read_run(options.run), time.time())
    except ReportError as error:
        print(f"prl-report: error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(as_json(summary), indent=1) if options.json else render(summary))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
