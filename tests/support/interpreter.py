"""The program of ``tests/support/interpreters.py``: imports torch once, forks for each script, and becomes it.

Reads lines of JSON, each with the scripts to start at once; answers with their process numbers, then with their exit
codes. An empty line is the end. A fork leaves the loop and runs its script as the main program, at the top level of the
main module, so that it comes to its end as any interpreter does: no frame is left, and exit functions, modules and
destructors follow.
"""

import gc
import json
import multiprocessing
import os
import sys
from typing import Any

import torch._dynamo  # which the constructor of an optimizer imports

import torchdistinput.testing


def prepare(job: dict[str, Any]) -> Any:
    """Takes the place of a shell; gives the compiled script."""
    os.setpgid(0, 0)
    os.chdir(job["folder"])
    os.environ.update(job["environment"])
    files = [os.open(os.devnull, os.O_RDONLY), *(os.open(path, os.O_WRONLY | os.O_CREAT) for path in job["outputs"])]
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    sys.argv = job["command"]
    more = job["environment"].get("PYTHONPATH")
    sys.path[:1] = [os.path.dirname(job["command"][0]), *(more.split(os.pathsep) if more else ())]
    with open(job["command"][0]) as script:
        return compile(script.read(), job["command"][0], "exec")


def answer(numbers: list[int]) -> None:
    sys.stdout.write(json.dumps(numbers) + "\n")
    sys.stdout.flush()


def serve() -> Any:
    """Starts scripts; returns in each of them, with what it is to run. In the first process, at the end: nothing."""
    for line in sys.stdin:
        if not line.strip():
            break
        numbers = []
        for job in json.loads(line):
            numbers.append(os.fork())
            if not numbers[-1]:
                return prepare(job)
        answer(numbers)
        answer([os.waitstatus_to_exitcode(os.waitpid(each, 0)[1]) for each in numbers])
    return ""


if sys.platform == "linux":  # the default before Python 3.14: the others import a script, and none here has a guard
    multiprocessing.set_start_method("fork")
gc.freeze()  # or each script would look at all of torch again, at its end
script = serve()
if script:
    __file__ = sys.argv[0]
    del gc, json, multiprocessing, os, Any, answer, prepare, serve, torch, torchdistinput
    exec(script)
