# shellcheck shell=bash
# Source this. `part` queues a command, `run_parts` runs what is queued, LANES at a time (2), and prints the parts in the
# order of the queue, each as it goes on; `summary` says how each went. Most tests wait for most of the time, so that two
# parts at a time keep two cores busy. LANES=1 runs one part after another.
# What the processes of a part computed is said, too: what a change costs shows there, whatever ran beside.
# A part may take long, but not fall silent: it is ended when it has printed nothing for 5 minutes (SILENCE=seconds).

silence=${SILENCE:-300} # seconds: more than any one test may take
longest=7200            # seconds of one part, though it goes on printing

names=()
commands=()
paths=() # PATH, as it was when the part was queued: it says under which MPI
lines=() # of the summary
work=()  # of each part
skipped=()
failed=0
ran=0 # parts
per_second=$(getconf CLK_TCK)
parts=$(mktemp -d)

# part NAME COMMAND...: queues the command.
part() {
    names+=("$1")
    shift
    commands+=("$(printf '%q ' "$@")")
    paths+=("$PATH")
}

# lane: runs parts that no other lane has taken, one after another, until there are none.
lane() {
    local number start computed ended rc job=
    trap 'kill $job 2>/dev/null; wait; exit 143' TERM
    for ((number = ran; number < ${#names[@]}; number++)); do
        mkdir "$parts/$number" 2>/dev/null || continue
        start=$SECONDS rc=0
        ticks computed
        PATH=${paths[number]} python "$PWD/ci/while_moving.py" "$silence:$longest" bash -c "exec ${commands[number]}" \
            </dev/null &>"$parts/$number/log" &
        job=$!
        wait "$job" || rc=$?
        job=
        ticks ended
        echo "$rc $((SECONDS - start)) $(((ended - computed) / per_second))" >"$parts/$number/new"
        mv "$parts/$number/new" "$parts/$number/ended"
    done
}

# ticks NAME: sets the variable to what the processes that this shell has waited for computed, in ticks of the clock.
ticks() {
    local fields
    read -ra fields <"/proc/$BASHPID/stat"
    printf -v "$1" %d $((fields[15] + fields[16]))
}

run_parts() {
    local number each
    trap end_parts EXIT
    for ((each = 0; each < ${LANES:-2}; each++)); do
        lane &
    done
    for ((number = ran; number < ${#names[@]}; number++)); do
        printf '\n=== %s\n' "${names[number]}"
        follow "$parts/$number"
        note "$number"
    done
    wait
    ran=${#names[@]}
}

# end_parts: ends what still runs.
end_parts() {
    local lanes
    lanes=$(jobs -rp)
    # shellcheck disable=SC2086 # several words
    [[ -z $lanes ]] || kill $lanes 2>/dev/null || true
    wait 2>/dev/null
    rm -rf "$parts"
}

# follow FOLDER: prints what the part prints, until it has ended.
follow() {
    local ended=
    until [[ -e $1/log ]]; do
        sleep 0.1
    done
    exec 3<"$1/log"
    while [[ -z $ended ]]; do
        [[ ! -e $1/ended ]] || ended=yes # before the last look
        cat <&3
        [[ -n $ended ]] || sleep 0.2
    done
    exec 3<&-
}

# note NUMBER: notes how the part went.
note() {
    local rc seconds computed verdict
    read -r rc seconds computed <"$parts/$1/ended"
    verdict=$(outcome "$rc" "$parts/$1/log")
    ((rc == 0)) || failed=$((failed + 1))
    [[ $verdict != SKIPPED* ]] || skipped+=("${names[$1]}: ${verdict#SKIPPED: }")
    lines+=("$(printf '%-40s %4d s  %s' "${names[$1]}" "$seconds" "$verdict")")
    work+=("$(printf '%d\t%s' "$computed" "${names[$1]}")")
}

# outcome CODE LOG: how the part went. Pytest ends well, too, if it has skipped all that it found.
outcome() {
    local last number reason
    last=$(plain "$2" | grep -E '^=* ?[0-9]+ (passed|failed|skipped|error).* in [0-9.]+s' | tail -n 1) || true
    number=$(grep -oE '[0-9]+ skipped' <<<"$last") || true
    case $1 in
    0) ;;
    124) echo "FAILED (printed nothing for $silence s, or went on for $longest s)" && return ;;
    *) echo FAILED && return ;;
    esac
    if [[ -n $number && $last != *passed* ]]; then
        reason=$(plain "$2" | sed -nE 's/^SKIPPED \[[0-9]+\] [^ ]+ //p' | head -n 1)
        echo "SKIPPED: ${reason:-no reason given}"
    else
        echo "ok${number:+, $number}"
    fi
}

# plain LOG: it without colours.
plain() {
    sed $'s/\033\\[[0-9;]*m//g' "$1"
}

# summary: a line for each part, what computed most, the slowest, and what was skipped as a whole.
summary() {
    local computed
    ticks computed # of the lanes, and all that ran in them
    printf '\n=== summary (%d s, %d s of a core)\n' "$SECONDS" $((computed / per_second))
    printf '%s\n' "${lines[@]}"
    printf '\n=== what computed most (s of a core)\n'
    printf '%s\n' "${work[@]}" | sort -rn | head -n 12
    printf '\n=== slowest parts (s)\n'
    printf '%s\n' "${lines[@]}" | sed -E 's/^(.{40}) +([0-9]+) s.*/\2\t\1/' | sort -rn | head -n 5
    if ((${#skipped[@]} > 0)); then
        printf '\n=== not tested at all\n'
        printf '%s\n' "${skipped[@]}"
    fi
}
