"""Joins the process group and prints, for each rank, the port it was told and the jobs of all ranks that it met."""

import json
import os
import sys
from collections.abc import Sequence

from megadiff.dist import process
from megadiff.dist.agree import gather
from megadiff.dist.launcher import run_command


def main(argv: Sequence[str]) -> None:
    here = process.start(timeout_seconds=120)
    met = gather(os.environ.get("JOB", ""))
    print(json.dumps({"rank": here.rank, "port": int(os.environ["MASTER_PORT"]), "met": met}), flush=True)
    process.stop()


if __name__ == "__main__":
    run_command(main, sys.argv[1:])
