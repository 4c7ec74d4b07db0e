#!/bin/sh
# The plain mutex with a bounded hold: nobody renews but the script itself, nothing stays behind, and
# the lock is free one ttl after the last renewal, whatever became of the script.
#
#   bounded-hold.sh app.lock list-of-files
set -eu

eval "$(withlock acquire --export --ttl 30s --wait 1m "$1")"
trap 'withlock release' EXIT

while read -r name; do
    # Well within the ttl. When it fails (exit 76) the lock is another's: stop, touch nothing more.
    withlock renew || { trap - EXIT; exit 1; }
    gzip -f "$name"
done <"$2"
