"List published results and experiments, measure them again, and store what came out"

import argparse
import sys
from collections.abc import Sequence

from reproductions.experiments import EXPERIMENTS, Outcome, run_experiment, store_outcome
from reproductions.results import REPRODUCTIONS, Result, reproduce, results_table, store_result
from reproductions.sinks import make_sink_arms, store_sink_arms
from stabilitylab.cases.registry import command_parser, run_command


def _list(args: argparse.Namespace) -> None:
    "All results and experiments."
    print(results_table().to_string())
    print()
    print("\n".join(f"{name:16} {experiment.question}" for name, experiment in EXPERIMENTS.items()))


def _short(value: object) -> str:
    "A value with few digits."
    if isinstance(value, list):
        return ", ".join(_short(part) for part in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _print_result(result: Result) -> None:
    "Prints a result, a line a check."
    print(f"{result.name}: {result.verdict} ({result.seconds:.0f} s, {result.settings})")
    marks = {True: "ok ", False: "NOT", None: "   "}
    for check in result.checks:
        print(f"  {marks[check.holds]} {check.what}: {_short(check.value)}; expected: {check.expected}")


def _reproduce(args: argparse.Namespace) -> None:
    "Published results, measured now."
    names = list(REPRODUCTIONS) if args.names == ["all"] else args.names
    if args.quick:
        names = [name for name in names if REPRODUCTIONS[name].is_quick]
    for name in names:
        result = reproduce(name)
        _print_result(result)
        if args.store:
            store_result(result)


def _print_outcome(outcome: Outcome) -> None:
    "Prints an outcome as tables."
    print(f"{outcome.name}: {outcome.settings}; {outcome.seconds:.0f} s")
    print(outcome.means().round(3).to_string())
    print(outcome.comparisons().round(3).to_string())


def _experiment(args: argparse.Namespace) -> None:
    "Experiments without an agreed answer, trained now."
    for name in list(EXPERIMENTS) if args.names == ["all"] else args.names:
        outcome = run_experiment(name)
        _print_outcome(outcome)
        if args.store:
            store_outcome(outcome)


def _sinks(args: argparse.Namespace) -> None:
    "The layers of the page on attention sinks, trained now."
    arms = make_sink_arms()
    print("\n".join(str(arm) for arm in arms))
    if args.store:
        store_sink_arms(arms)


def main(
    argv: Sequence[str] | None = None,  # arguments; None: of this process
) -> int:  # exit code: 0, or 2 with one line on standard error
    "Run the command."
    functions = {"list": _list, "reproduce": _reproduce, "experiment": _experiment, "sinks": _sinks}
    parser, subcommands = command_parser("python -m reproductions", functions)
    for name in ("reproduce", "experiment"):
        subcommands[name].add_argument("names", nargs="+", help="such as R1 or beta2, or all")
    for name in ("reproduce", "experiment", "sinks"):
        subcommands[name].add_argument("--store", action="store_true", help="store it in this folder")
    subcommands["reproduce"].add_argument("--quick", action="store_true", help="only those that take seconds")
    return run_command(parser, argv)


if __name__ == "__main__":
    sys.exit(main())
