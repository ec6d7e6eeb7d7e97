"A Jupyter workbench for unstable training runs: open the failed run, see what moved, replay, test fixes."

from importlib import import_module

from .names.encode import register_renderer

__version__ = "0.1.0"

# module -> its public names; loaded at first use, so that `import stabilitylab` needs neither torch nor matplotlib
_MODULES = {
    "names.words": ("define", "glossary"),
    "numerics.accumulation.weights": ("TokenMeanAccumulator", "make_window", "token_weights"),
    "numerics.accumulation.audit": ("audit_accumulation", "compare_denominators", "microbatch_window"),
    "cases.registry": ("case",),
    "checkpoint.open": ("open_checkpoint", "optimizer_names"),
    "checkpoint.diff": ("diff_checkpoints",),
    "checkpoint.scan": ("scan_checkpoint",),
    "detect.cross_run": ("compare_runs",),
    "detect.diagnose": ("diagnose",),
    "detect.findings": ("Finding", "Findings"),
    "detect.loss.spike_rules": ("OnlineRule", "compare_rules"),
    "detect.skipping": ("read_loss_scale",),
    "investigation.loop": ("investigate",),
    "investigation.opening": ("open_recordings",),
    "knowledge.remedies": ("contradictions", "phenomena", "remedies_for", "remedies_table"),
    "numerics.formats": ("debias", "lattice", "quantise", "spacing", "stochastic_round"),
    "numerics.non_finite": ("find_non_finite",),
    "plot.findings": ("plot_findings",),
    "plot.loss": ("plot_loss",),
    "plot.runs": ("plot_losses", "plot_trial"),
    "plot.replay": (
        "plot_lattice",
        "plot_precision",
        "plot_samples",
        "plot_scaling",
        "plot_swap",
        "plot_token_weights",
    ),
    "detect.layers.attention": ("find_logged_attention_logits",),
    "plot.attention": ("plot_heads", "plot_sinks", "plot_weights"),
    "probe.attention.heads": ("attention_statistics",),
    "probe.attention.report": ("AttentionProbe", "attention_report", "head_weights"),
    "probe.attention.layers": ("find_ignored_layers", "find_output_collapse", "layer_readings"),
    "probe.hf": ("RecorderCallback",),
    "probe.lightning": ("LightningCallback",),
    "probe.checks.invariants": ("check_training", "growth_exponents"),
    "probe.checks.forgetting": ("forgetting", "longest_that_fits", "repetition"),
    "probe.checks.positions": ("padding_influence", "shift_invariance"),
    "probe.checks.vocabulary": ("check_vocabulary", "sizes_to_take", "weight_faults"),
    "probe.recorder": ("Recorder",),
    "read.follow": ("follow",),
    "read.recognise": ("formats",),
    "read.runs": ("read_log", "read_runs"),
    "replay.bisect": ("bisect_precision",),
    "replay.blame": ("ablate", "blame", "token_losses"),
    "replay.compare_formats": ("compare_precision",),
    "replay.examine": ("examine", "ReplayJob"),
    "replay.implementations": ("compare_implementations",),
    "replay.rare_tokens": ("losses_by_frequency",),
    "replay.resume": ("rerun_verdict", "resume_check"),
    "replay.rounded_step": ("step_precision",),
    "replay.setup_check": ("check_setup",),
    "replay.snapshot": ("batch_of", "load_batch", "load_snapshot", "replayable_steps", "snapshot_of"),
    "replay.state": ("Batch", "Setup", "Snapshot"),
    "replay.step": ("noise_floor",),
    "replay.swap": ("swap_test",),
    "report.html": ("write_html",),
    "report.terminal": ("run_json", "run_markdown"),
    "numerics.rounding.attention_range": (
        "attention_inputs",
        "attention_scale_overflow",
        "find_scale_cause",
        "loss_rounding",
        "scale_overflows",
        "simulate_loss_scale",
    ),
    "numerics.rounding.loss_cast": ("adam_eps", "find_loss_cast", "lost_updates"),
    "run.job": ("Job",),
    "run.record": ("new_run", "open_run", "save_run", "validate_run"),
    "run.scalars": ("series", "summary"),
    "fixes.registry": ("apply_all", "fix"),
    "fixes.training": ("Training",),
    "models.parts": ("ModelConfig",),
    "models.decoder": ("LanguageModel", "TranslationModel"),
    "trial.start": ("Start", "last_snapshot_before"),
    "trial.suggest": ("suggest",),
    "trial.trial": ("Trial",),
    "trial.proxy": ("proxy",),
    "trial.settings": ("Recipe",),
    "trial.sweep": ("Sweep", "sweep"),
    "workbench.tabs": ("Workbench",),
}
register_renderer("findings", "stabilitylab.report.html:findings_table")
register_renderer("summary", "stabilitylab.report.html:summary_table")
_PUBLIC = {name: f"stabilitylab.{module}" for module, names in _MODULES.items() for name in names}
__all__ = sorted(_PUBLIC)


def __getattr__(name):
    "The public object `name`, imported when first asked for."
    if name not in _PUBLIC:
        raise AttributeError(
            f"module 'stabilitylab' has no attribute {name!r}; public names: {', '.join(__all__)}"
        )
    value = getattr(import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__():
    "Every public name, loaded or not."
    return sorted([*globals(), *_PUBLIC])
