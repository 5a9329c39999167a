# shellcheck shell=bash
# Source this: every Python process that starts from here on notes which lines it runs; `report_coverage` tells.
# Lost is what a process had noted that dies by a signal or ends its job by MPI_Abort.

# Not in every venv: where it is, numba imports it in every process, which is 7 % of a rank's start.
use openmpi
python -c 'import coverage' 2>/dev/null || python -m pip install -qq --disable-pip-version-check "coverage>=7.10"

export COVERAGE_PROCESS_START=$PWD/pyproject.toml
export COVERAGE_FILE=$parts/coverage/data
export PYTHONPATH=$PWD/ci/traced${PYTHONPATH:+:$PYTHONPATH}
mkdir "$parts/coverage"
always+=(-k "not at_any") # alarms at any time: one within coverage.py leaves its lock taken, and the process hangs

# report_coverage: the lines of each package that some process has run.
report_coverage() {
    local package
    use openmpi
    unset COVERAGE_PROCESS_START
    python -m coverage combine -q
    cp "$COVERAGE_FILE" .coverage # for `coverage html`
    printf '\n=== coverage: lines, missing, share\n'
    for package in commlib commlib/[a-z]*/ adapters/*/; do
        printf '%-32s %s\n' "$package" \
            "$(python -m coverage report --include="$package/*" 2>/dev/null | tail -n 1 | sed 's/^TOTAL *//')"
    done
}
