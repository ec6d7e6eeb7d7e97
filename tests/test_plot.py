"Figures as data: nothing lost by thinning, every broken value counted, marks where the findings are."

import re
from unittest import mock

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from stabilitylab.detect.findings import Finding, Findings
from stabilitylab.plot.findings import moving_mean, panels_of, plot_findings, x_values
from stabilitylab.plot.heads import extra_view_picture, extra_views
from stabilitylab.plot.loss import (
    _restart_steps,
    broken_points,
    keep_extremes,
    line_pieces,
    plot_loss,
    plot_series,
    short_number,
    wants_log,
)
from stabilitylab.plot.picture import findings_svg
from stabilitylab.plot.runs import plot_trial, trial_picture
from stabilitylab.plot.scene import COLOURS, colour, theme
from stabilitylab.run.record import new_run
from stabilitylab.run.scalars import Samples, make_scalars, series
from stabilitylab.trial.arm import ArmCurve


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def one(step, value, name="loss"):
    return series(make_scalars({name: Samples(np.asarray(step), np.asarray(value, float))}), name)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=400), st.integers(1, 40))
def test_thinning_keeps_what_each_pixel_shows(values, bins):
    y = np.array(values)
    x = np.arange(len(y))
    at = keep_extremes(x, y, bins)
    assert (
        (np.diff(at) > 0).all()
        and at[0] == 0
        and at[-1] == len(y) - 1
        and len(at) <= max(4 * bins, len(y) if len(y) <= 4 * bins else 0)
    )
    place = np.minimum((x * (bins / max(x[-1], 1e-300))).astype(int), bins - 1)
    for p in np.unique(place):  # slow twin: the lowest and highest of every part are kept
        kept = y[at[place[at] == p]]
        assert kept.min() == y[place == p].min() and kept.max() == y[place == p].max()


def test_every_finite_value_is_drawn_once():
    step = np.r_[0:300, 200:500, 100:150]
    value = np.random.default_rng(0).normal(3, 1, len(step))
    value[[5, 250, 400]] = np.nan, np.inf, -np.inf
    da = one(step, value)
    drawn = np.sort(np.concatenate([y for _, y, _ in line_pieces(da)]))
    assert np.array_equal(drawn, np.sort(value[np.isfinite(value)]))
    assert {k: len(v) for k, v in broken_points(da).items()} == {"NaN": 1, "inf": 1, "-inf": 1}


def test_the_kept_course_is_the_last_pass_of_each_step():
    step = np.r_[0:300, 200:500, 250:400]
    segment = np.r_[np.zeros(300), np.ones(300), np.full(150, 2)]
    pieces = line_pieces(one(step, segment))
    kept = {int(s): int(v) for x, y, pale in pieces if not pale for s, v in zip(x, y, strict=False)}
    assert kept == {s: 0 if s < 200 else 1 if s < 250 else 2 for s in range(400)}
    assert _restart_steps(one(step, segment)) == [200, 250]


def test_a_long_stretch_of_nan_cuts_the_line_a_short_one_does_not():
    v = np.ones(1000)
    v[400:500] = np.nan
    v[700:703] = np.nan
    assert [(x[0], x[-1]) for x, _, _ in line_pieces(one(np.arange(1000), v))] == [(0, 399), (500, 999)]


def test_rim_marks_are_counted_in_full_and_drawn_thinned():
    v = np.r_[np.ones(100), np.full(100_000, np.nan)]
    ax = plot_series(one(np.arange(len(v)), v))
    assert (
        "NaN (100,000)" in [line.get_label() for line in ax.lines]
        and sum(len(line.get_xdata()) for line in ax.lines) < 1000
    )


@pytest.mark.parametrize(
    "values, log",
    [
        ([1, 2, 3], False),
        ([0.1, 1, 10], True),
        ([0, 1, 100], False),
        ([-1, 1, 100], False),
        ([np.nan, np.inf], False),
        ([], False),
        ([5], False),
    ],
)
def test_logarithmic_only_where_it_can_be(values, log):
    da = one(np.arange(len(values)), values)
    assert wants_log(da) == log
    ax = plot_loss(da)
    ax.figure.canvas.draw()
    assert (ax.get_yscale() == "log") == log


def test_zero_on_a_logarithmic_axis_is_marked_and_counted():
    ax = plot_series(one(range(5), [1, 0, -2, 10, 100]), log=True)
    ax.figure.canvas.draw()
    assert "≤ 0 (2)" in [line.get_label() for line in ax.lines]


@pytest.mark.parametrize("dark", [False, True])
def test_colours_follow_meaning_and_ground(dark):
    with theme(dark=dark):
        ax = plot_loss(one(range(5), range(1, 6)))
        assert to_hex(ax.lines[0].get_color()) == COLOURS["loss"][dark] == colour("loss", ax)


def make_run(n=1000):
    step, v = np.arange(n), 2 + np.exp(-np.arange(n) / 200)
    return new_run(
        make_scalars(
            {
                "loss": Samples(step, v),
                "val_loss": Samples(step[::100], v[::100]),
                "grad_norm": Samples(step, v),
                "lr": Samples(step, v),
                "loss_scale": Samples(step, v),
                "z_loss": Samples(step, v),
            }
        )
    )


def test_marks_stand_at_the_findings_in_every_panel():
    f = Findings(
        [
            Finding("divergence", "error", 600, 900),
            Finding("loss_spike", "warning", 100, 150),
            Finding("loss_spike", "warning", 103),
            Finding("restart", "info", 300),
            Finding("plateau"),
        ]
    )
    axes = plot_findings(make_run(), f)
    axes[0].figure.canvas.draw()
    assert len(axes) == 4 and [t.get_text() for t in axes[0].texts] == ["2 3", "4", "1"]
    assert [t.xy[0] for t in axes[0].texts] == [
        100,
        300,
        600,
    ]  # 3 stands too close to 2 for a flag of its own
    for ax in axes:
        assert {600, 100, 103} <= {
            line.get_xdata()[0] for line in ax.lines if len(set(line.get_xdata())) == 1
        }
        assert len(ax.patches) == 2 and ax.get_xlim() == axes[0].get_xlim()


def test_panels_put_first_what_findings_name():
    assert panels_of(make_run()) == ["loss", "grad_norm", "lr", "loss_scale"]
    assert panels_of(make_run(), Findings([Finding("z_loss_collapse", "warning", 5, series="z_loss")])) == [
        "loss",
        "grad_norm",
        "lr",
        "z_loss",
    ]


def test_names_with_markup_or_mathematics_are_drawn_as_they_are():
    run = new_run(
        make_scalars(
            {
                "loss": Samples(np.arange(5), np.arange(5.0)),
                "val_loss": Samples(np.arange(5), np.arange(5.0)),
            },
            {"loss": r"$\frac{a", "val_loss": "--><script>x</script>"},
        )
    )
    svg = findings_svg(run, Findings())
    assert r"$\frac{a" in svg and "<script" not in svg


def test_a_million_steps_are_drawn_as_what_can_be_seen():
    n = 1_000_000
    run = new_run(
        make_scalars(
            {
                k: Samples(np.arange(n), np.random.default_rng(0).normal(3, 0.1, n))
                for k in ("loss", "grad_norm")
            }
        )
    )
    assert len(findings_svg(run, Findings())) < 400_000  # the marks that can be seen, not two million


@pytest.mark.parametrize(
    "value, words",
    [
        (0, "0"),
        (999, "999"),
        (1500, "1,500"),
        (12_500, "12.5k"),
        (3e9, "3G"),
        (1e-4, "0.0001"),
        (-2.5e-5, "-2.5e-5"),
        (1e300, "1e300"),
    ],
)
def test_short_numbers(value, words):
    assert short_number(value) == words


def test_an_arm_keeps_its_colour_while_another_has_not_begun():
    arms, step = ("unchanged", "qk_norm"), np.arange(9)
    curves = [ArmCurve(arm, 0, step, 3 - 0.1 * step) for arm in arms]
    whole, late = (plot_trial(some, ax=Figure().subplots(), arms=arms) for some in (curves, curves[1:]))
    colours = {line.get_label(): line.get_color() for line in whole.lines}
    assert late.lines[-1].get_label() == "qk_norm" and late.lines[-1].get_color() == colours["qk_norm"]
    assert colours["unchanged"] != colours["qk_norm"] and len(late.lines) == 2


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([1.0, 2.5, -3.0, 1e20, np.nan, np.inf]), max_size=60), st.integers(1, 25))
def test_a_moving_mean_is_the_mean_of_its_window_after_a_huge_value_too(values, window):
    half, y = window // 2, np.array(values)
    for i, smoothed in enumerate(moving_mean(y, window)):  # slow twin
        inside = y[max(i - half, 0) : i + half + 1]
        inside = inside[np.isfinite(inside)]
        assert smoothed == pytest.approx(inside.mean(), rel=1e-9) if len(inside) else np.isnan(smoothed)


def test_a_missing_time_does_not_move_the_clock():
    time = np.datetime64("2026-01-01T00:00") + 60 * np.arange(20) * np.timedelta64(1, "s")
    time = np.where(np.arange(20) == 7, np.datetime64("NaT"), time).astype("datetime64[ns]")
    scalars = make_scalars({"loss": Samples(np.arange(20), np.ones(20), time=time)})
    step, minutes, words = x_values(scalars, "time")
    assert 7 not in step and words.startswith("minutes") and minutes.tolist() == step.tolist()


def test_the_further_views_of_a_record_that_does_not_begin_at_step_0():
    units = {"long_name": "made", "units": "1"}
    streams = {"stream_first": 300.0, "stream_second": 3.0, "stream_third": 2.0, "stream_median": 0.1}
    data = {n: (("step", "layer"), np.full((3, 2), value), units) for n, value in streams.items()}
    data["sink_score"] = ("step", "layer", "head"), np.full((3, 2, 2), 0.5), units
    coords = {"step": [100, 110, 120], "module": ("layer", ["a", "b"]), "role": ("layer", ["self", "self"])}
    run = new_run(attention=xr.Dataset(data, coords))
    assert [name for _, name in extra_views(run)] == ["massive"]
    assert extra_view_picture(run, "massive", at=113.0).startswith(b"\x89PNG")


def test_numbers_on_the_axes_of_a_report_are_whole():
    loss, rate = np.linspace(3, 2, 60), np.linspace(0.001, 0.004, 60)
    run = new_run(
        make_scalars({name: Samples(np.arange(60), v) for name, v in {"loss": loss, "lr": rate}.items()})
    )
    svg = findings_svg(run, Findings([]))
    labels = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    assert {"0.0015", "0.003"} <= set(labels)
    assert not re.search(r'="[^"<>]*\.\d{3}', svg)  # places have hundredths of a point


def test_the_legend_of_a_running_trial_stands_within_the_picture():
    names = ["unchanged", "skip_batches:count=3", "lower_lr:factor=0.045,since=a_step_far_away"]
    curves = [ArmCurve(name, 0, np.arange(9), np.linspace(3, 2, 9)) for name in names]
    texts = []

    def keep(figure, **options):
        figure.canvas.draw()
        (ax,) = figure.axes
        texts.extend(text.get_text() for text in ax.get_legend().get_texts())
        assert ax.get_legend().get_window_extent().x1 <= figure.bbox.x1
        return b"png"

    with mock.patch("stabilitylab.plot.runs.figure_png", keep):
        _, (panel,) = trial_picture(curves)
    assert texts[1] == "skip_batches\ncount=3"
    assert [series["name"] for series in panel["series"]] == names
