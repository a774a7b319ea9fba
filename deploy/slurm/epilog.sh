#!/bin/sh
# Epilog of Slurm (slurm.conf: Epilog=…), as root on each node of a job: its target goes, and with it its series at
# the next scrape; its port is free again, its feed directory removed.
#
# Never fails: an epilog that fails drains the node.
SD_DIR=${SD_DIR:-/shared/prometheus/sd}
PORT_DIR=${PORT_DIR:-/run/training-exporter-ports}

[ -n "${SLURM_JOB_ID:-}" ] || exit 0
rm -f "$SD_DIR/training-$SLURM_JOB_ID-$(hostname -s).json" "$SD_DIR/.$SLURM_JOB_ID-$(hostname -s)".*
for port in "$PORT_DIR"/*; do
    [ -f "$port" ] && [ "$(cat "$port")" = "$SLURM_JOB_ID" ] && rm -f "$port"
done
[ -z "${SLURM_JOB_UID:-}" ] || rm -rf "${SHM_DIR:-/dev/shm}/exporter-$SLURM_JOB_UID-$SLURM_JOB_ID"
exit 0
