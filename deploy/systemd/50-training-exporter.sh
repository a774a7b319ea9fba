# shellcheck shell=sh
# /etc/profile.d/50-training-exporter.sh: jobs of this machine hand over to the machine's exporter.
if [ -d /run/training-exporter/feed ]; then
    EXPORTER_FEED_DIR=/run/training-exporter/feed
    export EXPORTER_FEED_DIR
fi
