# shellcheck shell=bash
# Source this: every Python process that starts from here on notes which lines it runs; `report_coverage` tells.
# Lost is what a process had noted that dies by a signal or ends its job by MPI_Abort.

export COVERAGE_PROCESS_START=$PWD/pyproject.toml
export COVERAGE_FILE=$parts/coverage/data
export PYTHONPATH=$PWD/ci/traced${PYTHONPATH:+:$PYTHONPATH}
mkdir "$parts/coverage"
always=(-k "not at_any") # alarms at any time: one within coverage.py leaves its lock taken, and the process hangs

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
