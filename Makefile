# Two commands set up a fresh machine: `make demo` (the main job) and `make test` (the tests to run before a commit).
PY ?= python3
BIN := .venv/bin
READY := .venv/.ready
TRACKERS := .venv/.trackers
# without compiling: most modules of the packages are never imported, and those that are compile themselves then
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt
NB ?= nbs
export PYTHONPATH := $(CURDIR)
export MPLBACKEND ?= agg
# images of containers often forbid bytecode: every process then compiles what it imports, torch for 3 s, transformers for 13
export PYTHONDONTWRITEBYTECODE :=
.DEFAULT_GOAL := test
.PHONY: gpu zoo calibrate mutants demo test test-slow test-all lab docs bench fuzz scale wheel reproduce pictures notebooks clean-check chromium

$(READY): constraints.txt settings.ini setup.py
	$(PY) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed; this is " + sys.version.split()[0])'
	$(PY) -m venv .venv
	$(PIP) torch
	$(PIP) --editable '.[dev]'
	touch $(READY)

# MLflow, W&B, trackio and Lightning want older versions of some packages of `.venv`: they have a place of their own,
# where a program finds the packages of `.venv` behind them
$(TRACKERS): $(READY) tests/trackers/requirements.txt
	$(BIN)/python -m venv --without-pip .venv/trackers
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$(.venv/trackers/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/behind.pth"
	.venv/trackers/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --requirement tests/trackers/requirements.txt
	touch $(TRACKERS)

demo: $(READY)
	$(BIN)/stabilitylab diagnose data_samples/lm_high_lr --html report.html
	$(BIN)/stabilitylab replay data_samples/lm_high_lr --step 352 --precision bf16 --precision fp16
	$(BIN)/stabilitylab trial data_samples/lm_high_lr --html report.html

test: $(READY)
	bash tests/run_all.sh fast

test-slow: $(READY) $(TRACKERS) chromium
	bash tests/run_all.sh slow

test-all: $(READY) $(TRACKERS) chromium
	bash tests/run_all.sh fast slow

lab: $(READY)
	$(BIN)/jupyter lab nbs/tutorials/the_workbench.ipynb

docs: $(READY)
	$(BIN)/python tests/docs/build.py

bench: $(READY)
	$(BIN)/python -m tests.benchmarks

calibrate: $(READY)
	$(BIN)/python -m tests.calibrate $(if $(REAL),--real)

zoo: $(READY)
	$(BIN)/python -m tests.zoo $(if $(PEERS),--peers $(PEERS))

mutants: $(READY)
	$(BIN)/python -m tests.mutants --sample $(or $(N),200)

fuzz: $(READY)
	$(BIN)/python -m tests.fuzz.run 100000

scale: $(READY)
	$(BIN)/python -m tests.scale $(NAMES)
	$(if $(NAMES),,$(BIN)/python -m tests.scale.ranks --out nbs/howto/many_ranks.json)

gpu: $(READY)
	$(BIN)/python -m tests.gpu $(if $(OUT),--out $(OUT))

wheel: $(READY)
	$(BIN)/python -m tests.wheel $(if $(PYTHON),--python $(PYTHON)) $(if $(REQUIRE),--require $(REQUIRE))

reproduce: $(READY)
	cd nbs/explain && $(CURDIR)/$(BIN)/python -m reproductions reproduce $(or $(NAMES),all)

pictures: $(READY) chromium
	SCREEN_SCALE=2 $(BIN)/python -m pytest -q tests/browser/pictures.py

notebooks: $(READY)
	$(BIN)/python tests/notebooks.py run $(NB)

clean-check: $(READY)
	$(BIN)/python tests/notebooks.py check

chromium:
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null; } || echo "no chromium: the browser tests will say that they were skipped"
