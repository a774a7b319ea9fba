#!/bin/sh
# Prolog of Slurm (slurm.conf: Prolog=…). Runs as root on each node of a job: writes a target file for Prometheus with the
# address of the job's exporter.
#
# deploy/prometheus/scrape/slurm.yaml reads the files, one per job and node. A file is written under a temporary name and
# renamed, because Prometheus watches the directory and would read an incomplete file. Each job on a node has a separate
# port, the first free port from 20909 on; task-prolog.sh passes the port to the job as $EXPORTER_PORT.
#
# Slurm drains a node if the prolog fails or hangs. The exit status is therefore always 0, and all work is killed after
# PATIENCE seconds, for example if the file server does not respond.
# Settings: SD_DIR, EXPORTER_FIRST_PORT, EXPORTER_PORTS, PORT_DIR, PATIENCE.
SD_DIR=${SD_DIR:-/shared/prometheus/sd}
PORT_DIR=${PORT_DIR:-/run/training-exporter-ports}
FIRST=${EXPORTER_FIRST_PORT:-20909}
COUNT=${EXPORTER_PORTS:-64}

write_target() {
    mkdir -p "$PORT_DIR"
    # The file of a port contains the id of the job that owns the port. `set -C` creates the file only if it does not exist.
    port=$FIRST
    while ! (set -C && echo "$SLURM_JOB_ID" >"$PORT_DIR/$port") 2>/dev/null; do
        [ "$(cat "$PORT_DIR/$port")" != "$SLURM_JOB_ID" ] || break # the job already owns the port
        port=$((port + 1))
        [ "$port" -lt $((FIRST + COUNT)) ] || { echo "training-exporter: no port left" >&2; return 1; }
    done
    chmod 0644 "$PORT_DIR/$port"
    host=$(hostname -f)
    # Users choose these names: strip quotes and backslashes, which would break the JSON.
    user=$(printf %s "${SLURM_JOB_USER:-}" | tr -cd 'A-Za-z0-9._@-')
    partition=$(printf %s "${SLURM_JOB_PARTITION:-}" | tr -cd 'A-Za-z0-9._@-')
    target="$SD_DIR/training-$SLURM_JOB_ID-$(hostname -s).json"
    # Prometheus does not match the name of the temporary file.
    unfinished="$SD_DIR/.$SLURM_JOB_ID-$(hostname -s).$$"
    printf '[{"targets":["%s:%s"],"labels":{"slurm_job_id":"%s","slurm_job_user":"%s","slurm_partition":"%s"}}]\n' \
        "$host" "$port" "$SLURM_JOB_ID" "$user" "$partition" >"$unfinished"
    chmod 0644 "$unfinished"
    mv -f "$unfinished" "$target"
}

if [ "${1:-}" = write_target ]; then
    set -eu
    write_target
    exit
fi
# A separate shell, because `set -e` has no effect on the left of `||`.
timeout -s KILL "${PATIENCE:-10}" sh "$0" write_target || echo "training-exporter: job ${SLURM_JOB_ID:-?} is not monitored" >&2
exit 0
