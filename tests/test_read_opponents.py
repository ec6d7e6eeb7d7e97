"""Logs of a generator and a discriminator whose losses have no word for loss."""

import json

import pytest

from stabilitylab.cli.main import main
from stabilitylab.read.runs import read_log

EPOCHS, COUNTS = range(1, 7), range(100, 1001, 100)


def level(epoch, count, network):
    "A loss that moves up and down as its opponent learns, and to another level in the middle of the run."
    return 0.2 + 0.1 * network + (count * 7 % 13) / 50 + 1.5 * (epoch > 3)


def written(folder, form, n):
    "The log of lines of one form, with `n` losses each."
    lines = [
        form.format(*(level(epoch, count, network) for network in range(n)), epoch=epoch, count=count)
        for epoch in EPOCHS
        for count in COUNTS
    ]
    (folder / "loss_log.txt").write_text(
        "==== Training Loss (Wed Oct 30 10:43:06 2024) ====\n" + "\n".join(lines)
    )
    return folder / "loss_log.txt"


FORMS = {
    "(epoch: {epoch}, iters: {count}, time: 0.1, data: 0.2) "
    "D_A: {:.3f} G_A: {:.3f} cycle_A: {:.3f} idt_A: {:.3f} ": (["d_a", "g_a", "cycle_a", "idt_a"]),
    "(epoch: {epoch}, iters: {count}, time: 0.1) D: {:.3f}, {:.3f} | G: {:.3f}, {:.3f} | ": [
        "d",
        "d_2",
        "g",
        "g_2",
    ],
    "[Epoch {epoch}] [Batch {count}/1000] critic: {:.4f} gen: {:.4f} gp: {:.4f}": ["critic", "gen", "gp"],
}


@pytest.mark.parametrize("form", FORMS)
def test_every_loss_is_a_series_and_none_is_the_loss(tmp_path, form):
    names = FORMS[form]
    log = read_log(written(tmp_path, form, len(names)))
    assert "loss" not in log.data_vars
    assert log.attrs["loss_is"].startswith("none")
    for network, name in enumerate(names):
        true = [level(epoch, count, network) for epoch in EPOCHS for count in COUNTS]
        assert log[name].values == pytest.approx(true, abs=6e-4)
        assert log[name].step.values[[0, -1]].tolist() == [100, 6000]


@pytest.mark.parametrize("form", FORMS)
def test_no_alarm_of_a_level_that_the_opponent_sets(tmp_path, form, capsys):
    assert main(["diagnose", str(written(tmp_path, form, len(FORMS[form]))), "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert not [finding["kind"] for finding in findings if finding["severity"] != "info"]


def test_the_user_may_name_one_of_them(tmp_path):
    path = written(tmp_path, next(iter(FORMS)), 4)
    assert read_log(path, loss="G_A").loss.values[0] == pytest.approx(level(1, 100, 1), abs=6e-4)


def test_a_letter_alone_is_no_opponent(tmp_path):
    (tmp_path / "run.log").write_text(
        "".join(f"step {i} G: {i / 7:.3f} loss: {3 / (i + 1):.3f}\n" for i in range(20))
    )
    log = read_log(tmp_path / "run.log")
    assert log.loss.values[0] == 3
    assert log.attrs["loss_is"] == "loss"
