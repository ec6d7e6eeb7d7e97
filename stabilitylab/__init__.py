"A Jupyter workbench for training runs that went unstable: open the failed run, see what moved first, replay, test fixes."
from importlib import import_module

__version__ = "0.1.0"

# public name -> module that holds it; loaded at first use, so that `import stabilitylab` needs neither torch nor matplotlib
_PUBLIC = {
    'Workbench': 'stabilitylab.workbench.core', 'diagnose': 'stabilitylab.detect.diagnose', 'compare_runs': 'stabilitylab.detect.across', 'compare_rules': 'stabilitylab.detect.rules', 'Finding': 'stabilitylab.detect.findings', 'Findings': 'stabilitylab.detect.findings',
    'open_run': 'stabilitylab.run.record', 'save_run': 'stabilitylab.run.record', 'new_run': 'stabilitylab.run.record', 'validate_run': 'stabilitylab.run.record',
    'Recorder': 'stabilitylab.probe.recorder', 'RecorderCallback': 'stabilitylab.probe.hf', 'OnlineRule': 'stabilitylab.detect.online',
    'read_log': 'stabilitylab.read.core', 'read_runs': 'stabilitylab.read.core', 'formats': 'stabilitylab.read.core', 'follow': 'stabilitylab.read.follow',
    'remedies_for': 'stabilitylab.knowledge.remedies', 'remedies_table': 'stabilitylab.knowledge.remedies', 'phenomena': 'stabilitylab.knowledge.phenomena', 'contradictions': 'stabilitylab.knowledge.phenomena',
    'plot_loss': 'stabilitylab.plot.loss', 'plot_findings': 'stabilitylab.plot.findings', 'write_html': 'stabilitylab.report.html', 'run_json': 'stabilitylab.report.machine', 'run_markdown': 'stabilitylab.report.markdown',
    'quantise': 'stabilitylab.numerics.formats', 'stochastic_round': 'stabilitylab.numerics.formats', 'lattice': 'stabilitylab.numerics.lattice',
    'Setup': 'stabilitylab.replay.snapshot', 'Snapshot': 'stabilitylab.replay.snapshot', 'Batch': 'stabilitylab.replay.snapshot', 'load_snapshot': 'stabilitylab.replay.snapshot', 'snapshot_of': 'stabilitylab.replay.snapshot', 'batch_of': 'stabilitylab.replay.snapshot', 'ReplayJob': 'stabilitylab.replay.job', 'load_batch': 'stabilitylab.replay.snapshot', 'replayable_steps': 'stabilitylab.replay.snapshot',
    'open_checkpoint': 'stabilitylab.checkpoint.open', 'scan_checkpoint': 'stabilitylab.checkpoint.scan', 'diff_checkpoints': 'stabilitylab.checkpoint.scan',
    'noise_floor': 'stabilitylab.replay.step', 'swap_test': 'stabilitylab.replay.swap', 'compare_precision': 'stabilitylab.replay.precision', 'bisect_precision': 'stabilitylab.replay.precision', 'blame': 'stabilitylab.replay.blame', 'token_losses': 'stabilitylab.replay.blame', 'ablate': 'stabilitylab.replay.blame',
    'lost_updates': 'stabilitylab.rounding.lost', 'adam_eps': 'stabilitylab.rounding.lost', 'attention_scale_overflow': 'stabilitylab.rounding.attention', 'loss_rounding': 'stabilitylab.rounding.attention', 'find_loss_cast': 'stabilitylab.rounding.loss_cast', 'simulate_loss_scale': 'stabilitylab.rounding.loss_scale', 'find_scale_cause': 'stabilitylab.rounding.loss_scale',
    'resume_check': 'stabilitylab.replay.resume', 'rerun_verdict': 'stabilitylab.replay.resume', 'examine': 'stabilitylab.replay.report', 'plot_swap': 'stabilitylab.plot.replay', 'plot_samples': 'stabilitylab.plot.replay', 'plot_precision': 'stabilitylab.plot.replay',
    'read_loss_scale': 'stabilitylab.rounding.loss_scale', 'debias': 'stabilitylab.numerics.lattice',
    'audit_accumulation': 'stabilitylab.accumulate.audit', 'TokenMeanAccumulator': 'stabilitylab.accumulate.accumulator', 'token_weights': 'stabilitylab.accumulate.weights', 'make_window': 'stabilitylab.accumulate.weights',
    'check_training': 'stabilitylab.probe.invariants', 'growth_exponents': 'stabilitylab.probe.invariants', 'attention_inputs': 'stabilitylab.rounding.attention', 'scale_overflows': 'stabilitylab.rounding.attention', 'deal': 'stabilitylab.accumulate.deal', 'compare_denominators': 'stabilitylab.accumulate.deal',
    'series': 'stabilitylab.run.scalars', 'summary': 'stabilitylab.run.summary',
}
__all__ = sorted(_PUBLIC)


def __getattr__(name):
    "The public object `name`, imported when first asked for."
    if name not in _PUBLIC: raise AttributeError(f"module 'stabilitylab' has no attribute {name!r}; public names: {', '.join(__all__)}")
    value = getattr(import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__():
    "Every public name, loaded or not."
    return sorted([*globals(), *_PUBLIC])
