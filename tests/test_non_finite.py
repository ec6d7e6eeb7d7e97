"The first value that is not finite: the operation, the line, the values and the reason, each planted."

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stabilitylab import Recorder
from stabilitylab.detect.facts.jump_facts import loss_event
from stabilitylab.detect.findings import Finding, Findings
from stabilitylab.detect.likely_cause import ranked_causes
from stabilitylab.numerics.non_finite import find_non_finite
from stabilitylab.replay.examine import examine
from stabilitylab.report.step import replay_html, replay_text
from stabilitylab.run.record import new_run
from stabilitylab.trial.suggest import suggest


class Net(nn.Module):
    "A layer with a function of its output behind it."

    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(3, 4), function

    def forward(self, x):
        return self.function(self.layer(x))


ALL, SOME = torch.ones(4, dtype=torch.bool), torch.tensor([True, False, False, True])
PLANTED = {
    "log": (lambda h: (0 * h).log(), "forward log", "log(0) = -inf", "logarithm of 0"),
    "negative": (lambda h: (-h.square() - 1).sqrt(), "forward sqrt", "= nan", "input is negative"),
    "exp": (lambda h: (1000 + h).exp(), "forward exp", "= inf", "3.403e+38, the largest float32"),
    "division": (lambda h: h / (0 * h.detach()), "forward div", "/ 0 = ", "divisor is 0"),
    "half": (lambda h: (1e5 + h).half().float(), "forward to", "", "6.55e+04, the largest float16"),
    "mask": (lambda h: h.masked_fill(ALL, -torch.inf).softmax(-1), "forward softmax", "", "hides all"),
    "labels": (
        lambda h: F.cross_entropy(h, torch.full((5,), -100)),
        "forward nll_loss",
        "",
        "no label counts",
    ),
    "no values": (lambda h: h[h > 1e9].mean(), "forward mean", "", "mean of no values"),
    "one value": (lambda h: h[:1].std(0), "forward std", "", "spread of a single value"),
    "frames": (
        lambda h: F.ctc_loss(h[:, None].log_softmax(-1), torch.tensor([[1, 2, 1, 2, 1, 2]]), (5,), (6,)),
        "forward ctc_loss",
        "",
        "more labels than its input has frames",
    ),
    "root": (lambda h: (0 * h).abs().sqrt(), "backward sqrt", "1 / 0 = inf", "slope of a root"),
    "where": (
        lambda h: torch.where(ALL, h, (0 * h).log()),
        "backward log",
        "0 / 0 = nan",
        "even in a branch of `where`",
    ),
    "power": (lambda h: (0 * h).abs() ** 0.3, "backward pow", "0 ** -0.7 = inf", "slope of this power"),
    "hidden label": (
        lambda h: F.cross_entropy(h.masked_fill(SOME, -torch.inf), torch.zeros(5, dtype=torch.long)),
        "forward masked_fill",
        "",
        "the program writes this infinity",
    ),
}


def origin_in(function, x=None, optimizer=None):
    torch.manual_seed(0)
    model, x = Net(function), torch.randn(5, 3) if x is None else x
    made = None if optimizer is None else optimizer(model.parameters())

    def run():
        model(x).sum().backward()
        if made is not None:
            made.step()

    return find_non_finite(model, run, x)


@pytest.mark.filterwarnings("ignore:std")  # torch warns of the spread of one value
@pytest.mark.parametrize("name", PLANTED)
def test_what_was_planted_is_found(name):
    function, where, values, cause = PLANTED[name]
    origin = origin_in(function)
    assert f"{origin.phase} {origin.operation}" == where
    assert values in origin.values and cause in origin.cause
    assert origin.location.startswith("test_non_finite.py, line") and origin.code


def test_a_step_that_divides_by_an_epsilon_of_zero_is_one_of_the_optimizer():
    origin = origin_in(lambda h: 0 * h, optimizer=lambda params: torch.optim.Adam(params, eps=0.0))
    assert (origin.phase, origin.operation, origin.cause) == ("update", "addcdiv", "the divisor is 0")


@pytest.mark.parametrize(
    "function",
    [
        lambda h: h,
        lambda h: h.masked_fill(SOME, -torch.inf).softmax(-1),
        lambda h: (0 * h).log().clamp(min=-100).detach() + h,  # an infinity that goes nowhere
        lambda h: F.scaled_dot_product_attention(h[None], h[None], h[None], is_causal=True),
        lambda h: h + 1 / torch.full((4,), torch.inf),
    ],
)
def test_what_is_finite_in_the_end_has_no_origin(function):
    assert origin_in(function) is None


def test_values_that_were_there_before_the_step_are_its_origin():
    x = torch.randn(5, 3)
    x[2, 1] = torch.nan
    origin = origin_in(lambda h: h, x)
    assert origin.words == "1 of 15 values of a tensor of the batch were not finite before the step"
    model = Net(lambda h: h)
    with torch.no_grad():
        model.layer.weight[0] = torch.inf
    origin = find_non_finite(model, lambda: model(torch.ones(2, 3)).sum().backward())
    assert origin.words == "3 of 12 values of a weight or buffer were not finite before the step"


def test_the_innermost_module_is_named_in_both_passes():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), Net(lambda h: (0 * h).sqrt()))
    model[1].layer = nn.Linear(4, 4)
    origin = find_non_finite(model, lambda: model(torch.ones(2, 3)).sum().backward())
    assert (origin.phase, origin.module) == ("backward", "1")
    model[1].function = lambda h: (0 * h).log()
    assert find_non_finite(model, lambda: model(torch.ones(2, 3)).sum().backward()).module == "1"


def record(path, batches, loss_of):
    "A record of a linear model, one step a batch."
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Recorder(model, optimizer, path, snapshot_every=2) as recorder:
        for given in batches:
            batch = recorder.batch(given)
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            recorder.step(loss)


def distance(model, batch):
    difference = model(batch["left"]) - model(batch["right"])
    return (difference**2).sum(-1).sqrt().mean()


def matching(model, batch):
    rows = model(batch["x"])
    return F.cross_entropy(rows @ rows.T, torch.arange(len(rows)))


@pytest.mark.slow
def test_a_replay_names_the_operation_and_the_sample(tmp_path):
    batches = [{"left": torch.randn(8, 3), "right": torch.randn(8, 3)} for _ in range(4)]
    batches[2]["right"][5] = batches[2]["left"][5]
    record(tmp_path / "run", batches, distance)
    answer = {"run": "run"} | examine(tmp_path / "run", 2, swap=False).to_dict()
    text = replay_text(answer)
    assert "not finite the gradient of `sqrt`: 0.125 / 0 = inf, in 1 of 8 values" in text
    assert "taken alone, the gradient of sample 5 is not finite" in text
    assert "</b> the gradient of <code>sqrt</code>: 0.125 / 0 = inf" in replay_html(answer, "head")
    after = examine(tmp_path / "run", 3, swap=False, samples=False)
    assert after.non_finite.phase == "weights"
    assert "non_finite" not in examine(tmp_path / "run", 1, swap=False, samples=False).to_dict()


@pytest.mark.slow
def test_a_loss_that_compares_samples_has_no_samples_of_its_own(tmp_path):
    record(tmp_path / "run", [{"x": torch.randn(8, 3)} for _ in range(3)], matching)
    reason = examine(tmp_path / "run", 2, swap=False).left_out["samples"]
    assert "it compares the samples with each other" in reason


def test_the_event_of_a_run_that_ends_in_nan_is_where_it_did_so_and_no_jump_that_was_over():
    noise = np.random.default_rng(0).normal(0, 0.01, 200)
    loss = 0.2 + noise
    loss[80] = 0.6  # over at once
    loss[150:] = np.nan
    assert loss_event(loss) == 150
    loss[150:] = 0.2
    assert loss_event(loss) == 80
    loss[150:] = np.nan
    loss[80:150] = np.linspace(0.6, 9, 70)  # and here the way to it
    assert loss_event(loss) == 80
    loss[150:] = 9.0
    assert loss_event(loss) == 80


def test_a_batch_that_the_loss_outlived_is_no_cause_of_a_later_nan():
    facts = {"found bad_batch_values": (1.0, 53), "input_peak": (900.0, 53), "input_jump": (1.0, 139)}
    (cause,) = ranked_causes(facts)
    assert cause.id == "bad_inputs" and "reach 900 times as far as any before it" in cause.words
    assert ranked_causes(facts | {"peak_to_nan": (87.0, 140)}) == []
    assert ranked_causes(facts | {"peak_to_nan": (1.0, 54)})


@pytest.mark.parametrize(
    ("dtype", "names"),
    [("float32", ["skip_non_finite", "placebo"]), ("float16", ["skip_non_finite", "adam_eps"])],
)
def test_remedies_of_half_precision_are_not_tried_on_a_run_in_float32(dtype, names):
    run = new_run(attrs={"optimizer": ["AdamW"], "eps": 1e-8, "dtypes": {"fc.weight": dtype}})
    lost = Finding("non_finite", "error", 40, series=("loss",), evidence={"stays": True, "names": ["loss"]})
    chosen = suggest(Findings([lost]), run)
    assert [suggestion.name for suggestion in chosen][: len(names)] == names
    # the fix by itself lowers epsilon, and the report is of a higher one
    assert all(each.parameters == {"eps": 1e-4} for each in chosen if each.name == "adam_eps")


class Masked(nn.Module):
    "Attention scores under a mask that is a buffer; a row of it may hide everything."

    def __init__(self, hides_row):
        super().__init__()
        self.layer = nn.Linear(3, 4)
        mask = torch.full((4, 4), -torch.inf).triu(1)
        mask[2] = -torch.inf if hides_row else mask[2]
        self.register_buffer("mask", mask)

    def forward(self, x):
        return ((self.layer(x) + self.mask).softmax(-1) ** 2).sum()


@pytest.mark.parametrize("where", ["buffer", "batch", "elsewhere"])
def test_a_mask_that_was_there_before_is_no_origin_and_a_row_that_it_hides_is(where):
    "The sum of a score and -inf was called too large for float32, and the softmax behind it was not named."
    torch.manual_seed(0)
    x, model = torch.randn(4, 3), Masked(True)
    mask = model.mask.clone()
    if where != "buffer":
        model.mask = None
        model.forward = lambda x: ((model.layer(x) + mask).softmax(-1) ** 2).sum()
    batch = {"mask": mask} if where == "batch" else None
    origin = find_non_finite(model, lambda: model(x).backward(), batch)
    assert (origin.operation, origin.count) == ("softmax", 4) and "a row is -inf throughout" in origin.cause
    causal = Masked(False)
    assert find_non_finite(causal, lambda: causal(x).backward()) is None


def test_a_statistic_that_is_nan_before_the_step_is_one_of_the_weights():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval()
    model[1].running_mean[1] = torch.nan
    origin = find_non_finite(model, lambda: model(torch.ones(2, 3)).sum().backward())
    assert origin.words == "1 of 4 values of a weight or buffer were not finite before the step"
