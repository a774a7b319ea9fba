# shellcheck shell=sh
# /etc/profile.d/50-training-exporter.sh: jobs on this machine write their feeds for the exporter of the machine.
if [ -d /run/training-exporter/feed ]; then
    EXPORTER_FEED_DIR=/run/training-exporter/feed
    export EXPORTER_FEED_DIR
fi
