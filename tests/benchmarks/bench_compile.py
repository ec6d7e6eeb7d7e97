"What recording costs under torch.compile: compiled and eager steps, with the recorder and without, in turn."

import argparse
import statistics
import tempfile
import time
import warnings

import torch

ARMS = {  # name -> (compiled, recorded)
    "eager": (False, False),
    "eager, recorded": (False, True),
    "compiled": (True, False),
    "compiled, recorded": (True, True),
}


class Arm:
    "One model, compiled or not, recorded or not."

    def __init__(self, config, is_compiled, is_recorded):
        from stabilitylab.models.decoder import LanguageModel
        from stabilitylab.probe.recorder import Recorder

        torch.manual_seed(0)
        self.model = LanguageModel(config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.call = torch.compile(self.model) if is_compiled else self.model
        self.folder, self.recorder = tempfile.TemporaryDirectory(), None
        if is_recorded:
            self.recorder = Recorder(self.model, self.optimizer, f"{self.folder.name}/r").__enter__()

    def step(self, tokens):
        "Seconds of one step."
        begin = time.perf_counter()
        loss = self.call(tokens, tokens)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.recorder:
            self.recorder.step(loss)
        return time.perf_counter() - begin

    def close(self):
        "End the record."
        if self.recorder:
            self.recorder.__exit__(None, None, None)


def main(argv=()):
    "Print the table."
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--width", type=int, default=256)
    options = parser.parse_args(argv)
    from stabilitylab.models.parts import ModelConfig

    warnings.simplefilter("ignore")
    config = ModelConfig.plain(vocab=128, seq=256, d_model=options.width, n_layer=4, n_head=4)
    tokens = torch.randint(0, 128, (4, 256))
    arms = {name: Arm(config, *how) for name, how in ARMS.items()}
    first = {name: arm.step(tokens) for name, arm in arms.items()}
    times = {name: [] for name in arms}
    for _ in range(options.steps):
        for name, arm in arms.items():
            times[name].append(arm.step(tokens))
    usual = {name: statistics.median(values) for name, values in times.items()}
    for name, value in usual.items():
        print(
            f"{name:20s} {1e3 * value:7.1f} ms, {value / usual['eager']:.2f} of eager; "
            f"the first step took {first[name]:.1f} s"
        )
    for arm in arms.values():
        arm.close()


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
