"""Each example, from its first line to its end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.interpreters import Interpreters, printed

GUIDE = """
range(6) in global batches of 4 over 2 replicas
  step 0   replica 0: [0, 1]   replica 1: [2, 3]
  step 1   replica 0: [4]   replica 1: [5]

range(4) in global batches of 4 over 5 replicas
  step 0   replica 0: [0]   replica 1: [1]   replica 2: [2]   replica 3: [3]   replica 4: []

range(8) in global batches of 4 over 3 replicas
  step 0   replica 0: [0, 1]   replica 1: [2, 3]   replica 2: []
  step 1   replica 0: [4, 5]   replica 1: [6, 7]   replica 2: []

range(9) in global batches of 4 over 4 replicas
  step 0   replica 0: [0]   replica 1: [1]   replica 2: [2]   replica 3: [3]
  step 1   replica 0: [4]   replica 1: [5]   replica 2: [6]   replica 3: [7]
  step 2   replica 0: [8]   replica 1: []   replica 2: []   replica 3: []

range(9) in global batches of 4 over 2 replicas
  step 0   replica 0: [0, 1]   replica 1: [2, 3]
  step 1   replica 0: [4, 5]   replica 1: [6, 7]
  step 2   replica 0: [8]   replica 1: []

FILE: file(s) of 6 and 6 lines in global batches of 4 over 2 workers
  step 0   replica 0: [0, 1]   replica 1: [6, 7]
  step 1   replica 0: [2, 3]   replica 1: [8, 9]
  step 2   replica 0: [4]   replica 1: [10]
  step 3   replica 0: [5]   replica 1: [11]

DATA: file(s) of 12 lines in global batches of 4 over 2 workers
  step 0   replica 0: [0, 1]   replica 1: [2, 3]
  step 1   replica 0: [4, 5]   replica 1: [6, 7]
  step 2   replica 0: [8, 9]   replica 1: [10, 11]

OFF: file(s) of 12 lines in global batches of 4 over 2 workers
  step 0   replica 0: [0, 1]   replica 1: [0, 1]
  step 1   replica 0: [2, 3]   replica 1: [2, 3]
  step 2   replica 0: [4, 5]   replica 1: [4, 5]
  step 3   replica 0: [6, 7]   replica 1: [6, 7]
  step 4   replica 0: [8, 9]   replica 1: [8, 9]
  step 5   replica 0: [10, 11]   replica 1: [10, 11]

FILE: file(s) of 5 and 2 lines in global batches of 4 over 2 workers
  step 0   replica 0: [0, 1]   replica 1: [5]
  step 1   replica 0: [2, 3]   replica 1: [6]
  step 2   replica 0: [4]   replica 1: []

FILE: one file over 2 workers
  worker 0 raises ShardingError
  worker 1 raises ShardingError

list_files, shuffled by a seed: equal on both workers True, complete True

a dataset function: range(9), every second number, global batches of 4 over 2 workers
  step 0   replica 0: [0, 2]   replica 1: [1, 3]
  step 1   replica 0: [4, 6]   replica 1: [5, 7]
  step 2   replica 0: [8]   replica 1: []

predictions by index: [1, 11, 21, 31, 41, 51, 61, 71, 81, 91, 101, 111, 121, 131, 141, 151, 161, 171, 181, 191, 201, \
211, 221, 231]

get_next_as_optional: at most 5 steps over range(9), doubled
  step 0   replica 0: [0, 2]   replica 1: [4, 6]
  step 1   replica 0: [8, 10]   replica 1: [12, 14]
  step 2   replica 0: [16]   replica 1: []

element_spec over 1 replica(s): TensorSpec(shape=(None,), dtype=torch.int64, name=None)

element_spec over 2 replica(s): PerReplica(
  0: TensorSpec(shape=(None,), dtype=torch.int64, name=None),
  1: TensorSpec(shape=(None,), dtype=torch.int64, name=None),
)

values from a function, plus one: [1, 11, 21]

three steps of an endless generator over 4 replicas
  step 0   replica 0: [0]   replica 1: [1]   replica 2: [2]   replica 3: [3]
  step 1   replica 0: [4]   replica 1: [5]   replica 2: [6]   replica 3: [7]
  step 2   replica 0: [8]   replica 1: [9]   replica 2: [10]   replica 3: [11]
"""


def test_the_main_job_learns_and_delivers_each_record_once_in_any_number_of_processes(
    interpreters: Interpreters,
) -> None:
    command = ("examples/train_text.py", "--files", "9", "--report-every", "2")
    for ended in (interpreters.run(command), interpreters.run_as_torchrun(2, *command)):
        output = printed(ended)
        losses = [float(loss) for loss in re.findall(r"loss (\S+) bits per byte", output)]
        assert len(losses) > 3, output
        assert losses[-1] < 0.7 * losses[0], output
        assert "each record was delivered exactly once" in output


def test_the_guide_prints_the_tables_of_the_guide(interpreters: Interpreters) -> None:
    assert printed(interpreters.run(["examples/guide.py"])) == GUIDE


def test_preprocessing_is_the_same_in_any_number_of_processes_and_goes_on_in_another(
    interpreters: Interpreters, tmp_path: Path
) -> None:
    command = "examples/preprocessing.py"
    alone = printed(interpreters.run([command, "--folder", str(tmp_path / "alone")]))
    there = ("--folder", str(tmp_path / "moved"))
    before = printed(interpreters.run_as_torchrun(2, command, *there, "--stop-after", "2"))
    after = printed(interpreters.run([command, *there]))
    for pattern in (r"^\d+ modules; .*$", r"^packages .*$"):  # to the last bit
        assert re.findall(pattern, alone, re.M) == re.findall(pattern, before, re.M) == re.findall(pattern, after, re.M)
    figures = r"^(?:epoch \d: loss|accuracy|served without ranks:) (\S+)"
    expected = [float(each) for each in re.findall(figures, alone, re.M)]
    found = [float(each) for each in re.findall(figures, before, re.M)[:2] + re.findall(figures, after, re.M)]
    assert len(expected) == 7
    assert expected[4] < 0.9 * expected[0]
    assert found == pytest.approx(expected, abs=0.004)


def test_statistics_of_files_are_the_same_to_the_last_digit_in_one_process_and_in_two(
    interpreters: Interpreters, tmp_path: Path
) -> None:
    command = ("examples/analyze.py", "--plot", str(tmp_path / "lengths.png"))
    alone = printed(interpreters.run(command))
    assert re.search(r"mean \d+\.\d{10,}, standard deviation", alone), alone
    assert printed(interpreters.run_as_torchrun(2, "examples/analyze.py")) == alone
    assert (tmp_path / "lengths.png").stat().st_size > 5_000


def test_the_evaluation_gives_exactly_the_metrics_of_one_process_in_any_number(interpreters: Interpreters) -> None:
    alone = printed(interpreters.run(["examples/evaluate.py"]))
    assert "1003 points, each once" in alone
    assert re.search(r"accuracy    9\d\d of 1003\nmedian loss 0\.\d+\nmean loss   0\.\d+\n", alone), alone
    for world in (2, 3):
        assert printed(interpreters.run_as_torchrun(world, "examples/evaluate.py")) == alone


def test_training_on_parquet_goes_on_in_an_epoch_and_is_the_same_in_one_process_and_in_two(
    interpreters: Interpreters,
) -> None:
    outputs = [
        printed(interpreters.run(["examples/train_parquet.py"])),
        printed(interpreters.run_as_torchrun(2, "examples/train_parquet.py")),
    ]
    alone, two = ([float(loss) for loss in re.findall(r"loss (\S+) over 8000 records", each)] for each in outputs)
    assert len(alone) == len(two) == 4
    assert alone[-1] < 0.5 * alone[0]
    assert all(abs(one - other) < 0.02 for one, other in zip(alone, two, strict=True))


def test_training_on_tar_archives_learns_in_any_number_of_processes(interpreters: Interpreters) -> None:
    command = "examples/train_tar.py"
    for ended in (interpreters.run([command]), interpreters.run_as_torchrun(2, command)):
        losses = [float(loss) for loss in re.findall(r"loss (\S+) over 720 samples, each once", printed(ended))]
        assert len(losses) == 3
        assert losses[-1] < 0.5 * losses[0]


def test_pretraining_killed_and_taken_up_by_other_numbers_of_processes_is_that_of_one_process(
    interpreters: Interpreters, tmp_path: Path
) -> None:
    """The check of the example itself proves the order of the packs, and that each token came once."""
    command = ["examples/pretrain.py", "--documents", "8", "--every", "2"]
    end = r"(each token was delivered once: .*)\nnorm of the weights (\S+)"
    alone = re.search(end, printed(interpreters.run([*command, "--checkpoint", str(tmp_path / "alone")])))
    there = ("--checkpoint", str(tmp_path / "moved"))
    for world in (4, 2):
        killed = interpreters.run_as_torchrun(world, *command, *there, "--crash-after", "3")
        assert all(each.code for each in killed)
    moved = re.search(end, printed(interpreters.run_as_torchrun(3, *command, *there)))
    assert alone is not None
    assert moved is not None
    assert alone[1] == moved[1]
    assert float(alone[2]) == pytest.approx(float(moved[2]), abs=1e-6)


def test_the_report_of_a_run_with_a_slow_rank_names_the_rank_and_the_file(
    interpreters: Interpreters, tmp_path: Path
) -> None:
    told = printed(interpreters.run(["examples/look.py", "--folder", str(tmp_path / "look")]))
    assert re.match(
        r"rank 1 made the others wait \d.*most of that in \S+/images-0004\.bin; loader workers would help", told
    )
    assert "made the others wait" in (tmp_path / "look" / "report.html").read_text()
    assert (tmp_path / "look" / "trace.json.gz").stat().st_size > 10_000
