"`stabilitylab sweep`: its plan, its table and JSON, and what it refuses."

import json

import pytest

from stabilitylab.cases.registry import sample
from stabilitylab.trial.start import Start
from stabilitylab.trial.sweep import points_of
from tests.command import command

SAMPLE = str(sample())


@pytest.mark.slow
def test_a_plan_names_the_start_and_every_point_and_trains_nothing(tmp_path):
    words = ("sweep", SAMPLE, "--rates", "0.1,1", "--fix", "clip_norm", "--axis", "adam_beta2.beta2=0.9,0.99")
    told = json.loads(command(*words, "--folder", tmp_path / "points", "--plan", "--json").stdout)
    assert told["start"]["step"] == 300 and told["steps"] == 100
    assert told["axes"] == {
        "fix": ["unchanged", "clip_norm"],
        "lr_times": [0.1, 1.0],
        "adam_beta2.beta2": [0.9, 0.99],
    }
    assert len(told["points"]) == 8 and not (tmp_path / "points").exists()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--rates", "0,1"], "--rates"),
        (["--rates", "fast"], "--rates"),
        (["--fix", "qk_nrom"], "qk_norm"),
        (["--axis", "beta2"], "--axis"),
        (["--axis", "nothing.beta2=1"], "nothing.beta2"),
        (["--seeds", "0"], "--seeds"),
    ],
)
def test_what_makes_no_sweep_is_one_sentence(words, named):
    answer = command("sweep", SAMPLE, *words, "--json")
    assert answer.returncode == 2 and named in json.loads(answer.stdout)["error"]
    assert len(answer.stderr.strip().splitlines()) == 1 and "fault of this program" not in answer.stderr


def test_a_fix_can_be_an_axis():
    start = Start(SAMPLE, 300)
    unchanged, both = points_of(start, {"fix": ["unchanged", "qk_norm+clip_norm:max_norm=0.5"]})
    assert not unchanged.arm.fixes and [row["name"] for row in both.arm.fixes] == ["qk_norm", "clip_norm"]
    (lower,) = points_of(start, {"fix": ["clip_norm"], "lr_times": [0.1]})
    assert [row["name"] for row in lower.arm.fixes] == ["clip_norm", "lower_lr"]


@pytest.mark.slow  # trains in a process
def test_the_same_call_goes_on_from_its_folder(tmp_path):
    words = ("sweep", SAMPLE, "--rates", "0.1,1", "--steps", "6", "--folder", tmp_path / "points")
    first = json.loads(command(*words, "--json").stdout)
    assert first["complete"] and [row["lr_times"] for row in first["points"]] == [0.1, 1.0]
    assert first["sensitivity"][0]["fix"] == "unchanged" and first["device"]["device"]
    (tmp_path / "points" / "point-1" / "seed-0" / "done.json").unlink()
    again = json.loads(command(*words, "--json").stdout)
    assert again["points"] == first["points"] and again["complete"]
    assert "lr times  unchanged" in command(*words).stdout
    other = command(*words[:-3], "7", "--folder", tmp_path / "points")
    assert other.returncode == 2 and "same sweep" in other.stderr
