#!/usr/bin/env bash
# `run_all.sh fast` and `run_all.sh slow`: the two halves of what CI runs; without a name both, and nothing twice.
# Every part runs even if an earlier one failed; the end says which, and what each part said last.
cd "$(dirname "$0")/.." || exit 1
export OMP_NUM_THREADS=1
bin=.venv/bin
said=$(mktemp -d); trap 'rm -rf "$said"' EXIT
touch "$said/.names" "$said/.failed"
part() {
  local name=$1 begin=$SECONDS; shift; echo "$name" >> "$said/.names"
  echo "== $name"
  "$@" 2>&1 | tee "$said/$name"
  [ "${PIPESTATUS[0]}" = 0 ] || echo "$name" >> "$said/.failed"
  echo "$((SECONDS-begin)) s" > "$said/$name.took"
}
site() {
  part docs   $bin/python tests/docs/build.py
  part search $bin/python tests/docs/search.py
}
fast() {
  part format $bin/ruff format --check nbs tests setup.py
  part lint   $bin/ruff check nbs tests setup.py
  part clean  $bin/python tests/notebooks.py check
  part pages  $bin/python tests/pages.py fast
  part pytest $bin/python -m pytest -q -n 2 --dist loadfile -m "not slow" tests  # a file on each core
}
slow() {
  part pages-slow  $bin/python tests/pages.py slow
  part pytest-slow $bin/python -m pytest -q -n 2 --dist loadfile --durations=25 --durations-min=10 -m slow --ignore=tests/browser tests
  site > "$said/.site" 2>&1 &  # needs one core, as the browser's tests do
  part browser     $bin/python -m pytest -q -m slow tests/browser
  wait
  cat "$said/.site"
}
[ $# -gt 0 ] || set -- fast slow
for half in "$@"; do $half; done
mapfile -t names < "$said/.names"; mapfile -t failed < "$said/.failed"
for name in "${failed[@]}"; do echo "== $name failed; its last lines again:"; tail -n 40 "$said/$name"; done
echo "== what each part said last"
for name in "${names[@]}"; do printf '%-12s %7s  %s\n' "$name" "$(cat "$said/$name.took")" "$(tail -n 1 "$said/$name")"; done
[ ${#failed[@]} = 0 ] || { echo "FAILED: ${failed[*]}"; exit 1; }
echo "everything passed: $*"
