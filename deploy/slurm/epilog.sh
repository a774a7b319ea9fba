#!/bin/sh
# Epilog of Slurm (slurm.conf: Epilog=…), as root on each node of a job: its target goes, and with it its series at
# the next scrape; its port is free again, its feed directory removed.
#
# Never fails and never hangs, since either drains the node: what is shared comes last, and is given PATIENCE seconds.
SD_DIR=${SD_DIR:-/shared/prometheus/sd}
PORT_DIR=${PORT_DIR:-/run/training-exporter-ports}

[ -n "${SLURM_JOB_ID:-}" ] || exit 0
for port in "$PORT_DIR"/*; do
    [ -f "$port" ] && [ "$(cat "$port")" = "$SLURM_JOB_ID" ] && rm -f "$port"
done
[ -z "${SLURM_JOB_UID:-}" ] || rm -rf "${SHM_DIR:-/dev/shm}/exporter-$SLURM_JOB_UID-$SLURM_JOB_ID"
host=$(hostname -s)
# shellcheck disable=SC2016 # expanded by the shell that is watched, which looks at the shared directory
timeout -s KILL "${PATIENCE:-10}" sh -c 'rm -f "$1/training-$2.json" "$1/.$2".*' sh "$SD_DIR" "$SLURM_JOB_ID-$host" ||
    echo "training-exporter: the target of job $SLURM_JOB_ID stays in $SD_DIR" >&2
exit 0
