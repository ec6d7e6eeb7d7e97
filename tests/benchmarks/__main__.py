"`python -m tests.benchmarks [NAME ...]`: run every `bench_*.py`, or those named, and print the figures."

import importlib
import sys
from pathlib import Path

here = Path(__file__).parent
names = sys.argv[1:] or sorted(p.stem.removeprefix("bench_") for p in here.glob("bench_*.py"))
for name in names:
    print(f"\n== {name}", flush=True)
    importlib.import_module(f"tests.benchmarks.bench_{name}").main()
