#!/bin/sh
# The same behaviours for a container without Python: job.sh KIND [SECONDS]. POSIX sh and coreutils.
# Takes the GPUs of CUDA_VISIBLE_DEVICES (numbers or uuids) by opening their devices; children inherit them.
kind=$1
seconds=${2:-60}
dev=${NVIDIA_LAB_DEV:-/dev}
lab=${NVIDIA_LAB_RPC:-/run/nvidia-lab}

take_gpus() {
    fd=5
    for index in $(echo "$CUDA_VISIBLE_DEVICES" | tr , ' '); do
        case $index in
            GPU-*) while read -r number uuid; do [ "$uuid" = "$index" ] && index=$number; done <"$lab/uuids" ;;
        esac
        # One descriptor each, from 5 to 9: a shell may not open more by number.
        case $fd in
            5) exec 5<>"$dev/nvidia$index" ;;
            6) exec 6<>"$dev/nvidia$index" ;;
            7) exec 7<>"$dev/nvidia$index" ;;
            8) exec 8<>"$dev/nvidia$index" ;;
            9) exec 9<>"$dev/nvidia$index" ;;
            *) echo "job.sh takes five GPUs at most" >&2; exit 2 ;;
        esac
        fd=$((fd + 1))
    done
}

steps() {
    n=0
    while [ "$n" -lt "$1" ]; do
        n=$((n + 1))
        echo "step $n loss 1.0"
        sleep 0.2
    done
}

case $kind in
    steady) take_gpus; steps $((seconds * 5)) ;;
    ignores-term) trap '' TERM INT HUP; take_gpus; steps $((seconds * 5)) ;;
    double-forks)
        setsid sh -c 'sh "$0" steady "$1" & exit 0' "$0" "$seconds"
        sleep "$seconds" ;;
    stalls) take_gpus; steps 3; sleep "$seconds" ;;
    spins) take_gpus; steps 3; exec timeout "$seconds" sh -c 'while :; do :; done' ;;
    stops) take_gpus; steps 3; kill -STOP $$; sleep "$seconds" ;;
    exits) take_gpus; steps 2; exit 3 ;;
    progress)
        take_gpus; n=0
        while [ "$n" -lt $((seconds * 5)) ]; do n=$((n + 1)); printf '\rtraining %3d%%' "$n"; sleep 0.2; done
        echo ;;
    floods) timeout 60 sh -c 'yes "$(printf "%0120d" 0)" | head -c 50000000'; echo; echo "flood is over" ;;
    *) echo "job.sh: no kind '$kind'" >&2; exit 2 ;;
esac
