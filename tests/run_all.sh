#!/usr/bin/env bash
# Everything CI runs, in order; every part runs even if an earlier one failed, and the end says which.
cd "$(dirname "$0")/.." || exit 1
bin=.venv/bin; failed=()
told=$(mktemp -d); trap 'rm -rf "$told"' EXIT
part() {
  local name=$1 begin=$SECONDS; shift
  echo "== $name"
  "$@" 2>&1 | tee "$told/$name"
  [ "${PIPESTATUS[0]}" = 0 ] || failed+=("$name")
  echo "== $name took $((SECONDS-begin)) s"
}
part format $bin/ruff format --check nbs tests setup.py
part lint   $bin/ruff check nbs tests setup.py
part layout $bin/python -m pytest -q tests/test_layout.py
part pages  $bin/python tests/pages.py
part pytest env OMP_NUM_THREADS=1 $bin/python -m pytest -q -n 2 --dist loadfile --ignore=tests/test_layout.py --ignore=tests/browser tests  # a file on each core
part browser $bin/python -m pytest -q tests/browser
part docs   $bin/python tests/docs/build.py
part clean  $bin/python tests/notebooks.py check
if [ ${#failed[@]} -gt 0 ]; then
  for name in "${failed[@]}"; do echo "== $name failed; its last lines again:"; tail -n 40 "$told/$name"; done
  printf 'FAILED: %s\n' "${failed[@]}"; exit 1
fi
echo "everything passed"
