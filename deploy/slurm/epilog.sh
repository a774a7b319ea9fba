#!/bin/sh
# Epilog of Slurm (slurm.conf: Epilog=…). Runs as root on each node of a job: removes the job's target file, frees the port
# and deletes the feed directory. Prometheus ends the series of the target at the next scrape.
#
# Slurm drains a node if the epilog fails or hangs. The exit status is therefore always 0, and the only access to the shared
# directory is the last command, which is killed after PATIENCE seconds.
SD_DIR=${SD_DIR:-/shared/prometheus/sd}
PORT_DIR=${PORT_DIR:-/run/training-exporter-ports}

[ -n "${SLURM_JOB_ID:-}" ] || exit 0
for port in "$PORT_DIR"/*; do
    [ -f "$port" ] && [ "$(cat "$port")" = "$SLURM_JOB_ID" ] && rm -f "$port"
done
[ -z "${SLURM_JOB_UID:-}" ] || rm -rf "${SHM_DIR:-/dev/shm}/exporter-$SLURM_JOB_UID-$SLURM_JOB_ID"
host=$(hostname -s)
# shellcheck disable=SC2016 # the shell under `timeout` expands the arguments
timeout -s KILL "${PATIENCE:-10}" sh -c 'rm -f "$1/training-$2.json" "$1/.$2".*' sh "$SD_DIR" "$SLURM_JOB_ID-$host" ||
    echo "training-exporter: the target of job $SLURM_JOB_ID stays in $SD_DIR" >&2
exit 0
