#!/bin/sh
# TaskProlog of Slurm. Runs as the user before each task; Slurm adds the printed lines `export NAME=value` to the task's
# environment.
#
# Each job has a separate feed directory and port, so that several jobs of a user can run on one node.
PORT_DIR=${PORT_DIR:-/run/training-exporter-ports}

feed=${SHM_DIR:-/dev/shm}/exporter-$(id -u)-$SLURM_JOB_ID
(umask 077 && mkdir -p "$feed")
# Any user can create entries in /dev/shm: use the directory only if it belongs to this user and is not a symbolic link.
[ ! -L "$feed" ] && [ "$(stat -c %u "$feed")" = "$(id -u)" ] && echo "export EXPORTER_FEED_DIR=$feed"
for port in "$PORT_DIR"/*; do
    [ -f "$port" ] && [ "$(cat "$port")" = "$SLURM_JOB_ID" ] && echo "export EXPORTER_PORT=${port##*/}"
done
exit 0
