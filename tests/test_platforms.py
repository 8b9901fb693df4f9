"""Systems that lack what Linux has: nothing is asked for at import, and what needs no loader workers works.

Torch and the standard library are loaded as what they are here; then the names go that they do not have there.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.interpreters import Interpreters, printed

LOADED = """
import ctypes, importlib, mmap, multiprocessing, os, pkgutil, select, signal, sys
import multiprocessing.context, multiprocessing.reduction, multiprocessing.queues
import fsspec, numpy, pyarrow.compute, torch, torch.distributed.checkpoint, torch.utils.data

def lose(module, *names):
    for name in names:
        vars(module).pop(name, None)

for name in [name for name in sys.modules if name.partition(".")[0] == "torchdistinput"]:
    del sys.modules[name]  # it is loaded anew, on the other system

lose(mmap, *[name for name in vars(mmap) if name.startswith(("MADV_", "MAP_"))])
lose(os, "memfd_create", "pidfd_open", "eventfd", "pipe2", "sched_getaffinity", "posix_fadvise")
"""

MACOS = """
sys.platform = "darwin"
sys.modules["fcntl"].__dict__.pop("F_SETPIPE_SZ", None)
"""

WINDOWS = """
sys.platform = "win32"
lose(os, "fork", "register_at_fork", "sched_yield", "getpgid", "setpgid", "killpg", "getuid", "geteuid", "O_CLOEXEC")
lose(os, "O_NONBLOCK", "WNOHANG", "waitpid", "mkfifo")
lose(signal, "SIGALRM", "SIGKILL", "SIGUSR1", "SIGCHLD", "alarm", "setitimer")
lose(select, "poll", "POLLIN", "epoll")
lose(multiprocessing.reduction, "DupFd", "sendfds", "recvfds")
lose(multiprocessing.context, "ForkContext", "ForkProcess", "ForkServerContext", "ForkServerProcess")
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None

class CDLL:
    def __init__(self, name, *_):
        raise TypeError("LoadLibrary() argument 1 must be str, not None")

ctypes.CDLL = CDLL
"""

USED = """
import torchdistinput as tdi
for module in pkgutil.walk_packages(tdi.__path__, "torchdistinput."):
    if ".integrations." not in module.name:  # which load other packages
        importlib.import_module(module.name)
assert [batch.tolist() for batch in tdi.DataLoader(torch.arange(5), 2)] == [[0, 1], [2, 3], [4]]
lines = tdi.FileDataset([__file__], tdi.readers.text_lines)
for data in (torch.utils.data.DataLoader(range(5), 2), torch.utils.data.DataLoader(lines, 2), torch.arange(4).split(2)):
    dataset = tdi.Strategy(["cpu", "cpu"]).distribute_dataset(data)
    assert list(dataset)
    dataset.load_state_dict(dataset.state_dict())
    for _ in dataset:
        break
    dataset.close()
print("done")
"""


@pytest.mark.parametrize("system", [MACOS, WINDOWS], ids=["macOS", "Windows"])
def test_all_modules_load_and_steps_are_made_on_a_system_that_has_less(
    system: str, interpreters: Interpreters, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(LOADED + system + USED)
    assert printed(interpreters.run([str(script)])) == "done\n"
