"""Each example, from its first line to its end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.interpreters import Interpreters, printed


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
