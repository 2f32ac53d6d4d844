"""Commands of `sagellm` in processes of their own, forked from one that has imported torch.

It saves two seconds of each. What a start from nothing does, `tests/cli/test_process.py` shows.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

_TEMPLATE = """
import json, os, sys
import sagellm.engines.native.from_config
from sagellm.cli import main

for line in sys.stdin:
    asked = json.loads(line)
    child = os.fork()
    if not child:
        for number, (path, mode) in enumerate([(os.devnull, os.O_RDONLY), *asked["outputs"]]):
            os.dup2(os.open(path, mode, 0o600), number)
        os.environ.clear()
        os.environ.update(asked["environment"])
        sys.argv = ["sagellm", *asked["arguments"]]
        main()
        sys.exit()
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


@cache
def _template() -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    started = subprocess.Popen(
        [sys.executable, "-c", _TEMPLATE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    atexit.register(started.communicate)  # it ends at the end of its input
    return started


def sagellm(*arguments: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """`sagellm` with these arguments and variables, its output, and its exit status."""
    template = _template()
    assert template.stdin is not None
    assert template.stdout is not None
    with TemporaryDirectory() as folder:
        outputs = [Path(folder) / name for name in ("stdout", "stderr")]
        asked = {
            "arguments": arguments,
            "environment": dict(environment),
            "outputs": [(str(path), os.O_WRONLY | os.O_CREAT) for path in outputs],
        }
        print(json.dumps(asked), file=template.stdin, flush=True)
        status = int(template.stdout.readline())
        shown = [path.read_text(encoding="utf-8") for path in outputs]
    return subprocess.CompletedProcess(arguments, status, *shown)
