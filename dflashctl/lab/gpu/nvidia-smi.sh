#!/bin/sh
# nvidia-smi of the simulated GPUs: carries its arguments to the driver process and prints the answer.
# POSIX sh and coreutils only, so that it works in a container without Python and as any user.
#
# A call is a private folder: `argv` (NUL-separated), `nodes` (which device files this caller sees, by device and
# inode), `pidns` (which pid namespace it is in), and the fifo `answer`. Its name goes to the control fifo; the answer
# is the exit code on a line, then the text. The word `hang` instead of a code is a GPU that never answers.
PATH=/usr/sbin:/usr/bin:/sbin:/bin
export PATH
lab=${NVIDIA_LAB_RPC:-/run/nvidia-lab}
dev=${NVIDIA_LAB_DEV:-/dev}
deadline=${NVIDIA_LAB_DEADLINE_S:-30}

if [ "$1" != --lab-inner ]; then
    if [ ! -p "$lab/control" ]; then
        echo "nvidia-smi (simulated): $lab/control is not there: the lab's folder is not mounted here" >&2
        exit 96
    fi
    umask 077
    call=$(mktemp -d "$lab/calls/XXXXXXXXXX") || exit 96
    trap 'rm -rf "$call"' EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP
    mkfifo "$call/answer" || exit 96
    : > "$call/argv"
    for arg do printf '%s\0' "$arg" >> "$call/argv"; done
    stat -L -c '%n %d:%i' "$dev"/nvidia[0-9]* "$dev"/nvidiactl 2>/dev/null |
        while read -r node id; do
            [ -r "$node" ] && [ -w "$node" ] && echo "${node##*/} $id"
        done > "$call/nodes"
    readlink /proc/self/ns/pid > "$call/pidns"
    # Both waits have a deadline: opening the control fifo blocks while no driver reads it.
    timeout "${NVIDIA_LAB_DEADLINE_S:-5}" "$0" --lab-inner announce "${call##*/}" || {
        echo "nvidia-smi (simulated): nobody reads $lab/control: the GPU driver process is gone" >&2
        exit 97
    }
    # In the background, so that a signal ends this shell (and its folder) at once.
    timeout "$deadline" "$0" --lab-inner answer "$call" &
    child=$!
    trap 'kill "$child" 2>/dev/null; exit 130' INT
    trap 'kill "$child" 2>/dev/null; exit 143' TERM HUP
    wait "$child"
    code=$?
    case $code in
        124) echo "nvidia-smi (simulated): no answer within $deadline s: the driver process is stuck" >&2; exit 97 ;;
        98)  # The simulated hang: as long as the driver lives and anybody cares to wait.
            cat "$call/answer" & child=$!
            wait "$child"
            exit 1 ;;
    esac
    exit "$code"
fi

case $2 in
    announce) printf '%s\n' "$3" > "$lab/control" ;;
    answer)
        {
            read -r code || exit 97
            [ "$code" = hang ] && exit 98
            cat
            exit "$code"
        } < "$3/answer" ;;
esac
