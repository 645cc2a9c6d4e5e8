#!/bin/sh
# The whole life cycle on the embedded lab, each command shown before it runs. `make demo` calls this.
set -eu
cd "$(dirname "$0")/../.."

# A lab of its own, so that one you have up already is left alone.
DFLASHCTL_LAB_DIR=$(mktemp -d "${TMPDIR:-/tmp}/dflash-demo.XXXXXX")
export DFLASHCTL_LAB_DIR
finish() {
  code=$?
  trap - EXIT INT TERM
  dflashctl lab down >/dev/null 2>&1 || :
  rm -rf "$DFLASHCTL_LAB_DIR"
  exit "$code"
}
trap finish EXIT
trap 'exit 130' INT TERM

run() {
  if [ -t 1 ]; then printf '\n\033[1m$ %s\033[0m\n' "$*"; else printf '\n$ %s\n' "$*"; fi
  "$@"
}

echo "A drafter is trained and measured on an embedded lab; all of it takes about two minutes."
run dflashctl lab up
run dflashctl gpu
run dflashctl deploy
run dflashctl launch --tag demo
run dflashctl status demo --watch
run dflashctl logs demo -n 15
run dflashctl runs
run dflashctl runs show demo
run dflashctl lab down
