#!/bin/sh
# Prolog of Slurm (slurm.conf: Prolog=…), as root on each node of a job: tells Prometheus where the job's exporter is.
#
# One file for each job and node, for deploy/prometheus/scrape/slurm.yaml. Written under another name and renamed,
# since Prometheus watches the directory and would read half a file. Several jobs of a node have a port each,
# counted from 20909; their jobs read it from $EXPORTER_PORT (task-prolog.sh).
#
# Never fails and never hangs, since either drains the node: what takes longer than PATIENCE seconds, as on a
# file system whose server is gone, is killed. Settings: SD_DIR, EXPORTER_FIRST_PORT, EXPORTER_PORTS, PORT_DIR, PATIENCE.
SD_DIR=${SD_DIR:-/shared/prometheus/sd}
PORT_DIR=${PORT_DIR:-/run/training-exporter-ports}
FIRST=${EXPORTER_FIRST_PORT:-20909}
COUNT=${EXPORTER_PORTS:-64}

tell() {
    mkdir -p "$PORT_DIR"
    # A port belongs to the job whose number its file holds; `set -C` makes taking it one step.
    port=$FIRST
    while ! (set -C && echo "$SLURM_JOB_ID" >"$PORT_DIR/$port") 2>/dev/null; do
        [ "$(cat "$PORT_DIR/$port")" != "$SLURM_JOB_ID" ] || break # a prolog that runs again
        port=$((port + 1))
        [ "$port" -lt $((FIRST + COUNT)) ] || { echo "training-exporter: no port left" >&2; return 1; }
    done
    chmod 0644 "$PORT_DIR/$port"
    host=$(hostname -f)
    # What users choose is not trusted with quotes and backslashes.
    user=$(printf %s "${SLURM_JOB_USER:-}" | tr -cd 'A-Za-z0-9._@-')
    partition=$(printf %s "${SLURM_JOB_PARTITION:-}" | tr -cd 'A-Za-z0-9._@-')
    target="$SD_DIR/training-$SLURM_JOB_ID-$(hostname -s).json"
    # The name of the temporary file is not one that Prometheus looks for.
    unfinished="$SD_DIR/.$SLURM_JOB_ID-$(hostname -s).$$"
    printf '[{"targets":["%s:%s"],"labels":{"slurm_job_id":"%s","slurm_job_user":"%s","slurm_partition":"%s"}}]\n' \
        "$host" "$port" "$SLURM_JOB_ID" "$user" "$partition" >"$unfinished"
    chmod 0644 "$unfinished"
    mv -f "$unfinished" "$target"
}

if [ "${1:-}" = tell ]; then
    set -eu
    tell
    exit
fi
# A shell of its own, since `set -e` means nothing to the left of `||`.
timeout -s KILL "${PATIENCE:-10}" sh "$0" tell || echo "training-exporter: job ${SLURM_JOB_ID:-?} is not monitored" >&2
exit 0
