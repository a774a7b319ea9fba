#!/bin/sh
# TaskProlog of Slurm, as the user before each task: what it prints as `export NAME=value` is the task's environment.
#
# Each job has a feed directory and a port of its own, so that several jobs of a user on one node stay apart.
PORT_DIR=${PORT_DIR:-/run/training-exporter-ports}

feed=${SHM_DIR:-/dev/shm}/exporter-$(id -u)-$SLURM_JOB_ID
(umask 077 && mkdir -p "$feed")
# Where anybody may create things, somebody may have been first: a directory, or a link to one, that is not the user's.
[ ! -L "$feed" ] && [ "$(stat -c %u "$feed")" = "$(id -u)" ] && echo "export EXPORTER_FEED_DIR=$feed"
for port in "$PORT_DIR"/*; do
    [ -f "$port" ] && [ "$(cat "$port")" = "$SLURM_JOB_ID" ] && echo "export EXPORTER_PORT=${port##*/}"
done
exit 0
