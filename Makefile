# Two commands set up a fresh machine: `make demo` (the main job) and `make test` (everything CI runs).
PY ?= python3
BIN := .venv/bin
READY := .venv/.ready
NB ?= nbs
export PYTHONPATH := $(CURDIR)
export MPLBACKEND ?= agg
.DEFAULT_GOAL := test
.PHONY: demo test lab docs bench fuzz pictures notebooks clean-check chromium

$(READY): constraints.txt settings.ini setup.py
	$(PY) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed; this is " + sys.version.split()[0])'
	$(PY) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

demo: $(READY)
	$(BIN)/stabilitylab diagnose data_samples/lm_high_lr --html report.html
	$(BIN)/stabilitylab replay data_samples/lm_high_lr --step 351 --precision bf16 --precision fp16
	$(BIN)/stabilitylab trial data_samples/lm_high_lr --html report.html

test: $(READY) chromium
	bash tests/run_all.sh

lab: $(READY)
	$(BIN)/jupyter lab nbs/tutorials/the_workbench.ipynb

docs: $(READY)
	$(BIN)/python tests/docs/build.py

bench: $(READY)
	$(BIN)/python -m tests.benchmarks

fuzz: $(READY)
	$(BIN)/python -m tests.fuzz.run 100000

pictures: $(READY) chromium
	SCREEN_SCALE=2 $(BIN)/python -m pytest -q tests/browser/pictures.py

notebooks: $(READY)
	$(BIN)/python tests/notebooks.py run $(NB)

clean-check: $(READY)
	$(BIN)/python tests/notebooks.py check

chromium:
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null; } || echo "no chromium: the browser tests will say that they were skipped"
